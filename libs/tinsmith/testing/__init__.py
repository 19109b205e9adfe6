"""Fakes and fault tools that the tests use, themselves tested."""
