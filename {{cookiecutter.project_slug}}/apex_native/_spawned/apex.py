"""What `import apex` finds in a process that was spawned under ``python -m apex_native``."""

from apex_native.__main__ import install

install()  # puts apex_native in this module's place
