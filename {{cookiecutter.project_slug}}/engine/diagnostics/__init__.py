"""Diagnostics: preflight checks (``--check``), the first-step audit and NaN detection."""
