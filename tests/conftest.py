"""Fixtures of all tests."""

from models import every_product_deferred  # noqa: F401
