"""The demo: a small real model learns a style of answering, through the ordinary client."""
