"""Fixtures of the library tests."""

from library_fixtures import *  # noqa: F403
