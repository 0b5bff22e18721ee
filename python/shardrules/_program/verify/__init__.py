"""Compares compiled programs and live arrays with a plan."""
