"""The module `apex` of processes that were spawned under ``python -m apex_native``."""

from apex_native.__main__ import install

install()  # replaces this module by apex_native
