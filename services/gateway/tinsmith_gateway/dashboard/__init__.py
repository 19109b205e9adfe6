"""What the dashboard shows, and the page that shows it."""
