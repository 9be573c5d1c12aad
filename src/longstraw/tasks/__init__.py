"""Tasks that ship with the package: prompts and rewards, each in one file, usable as `longstraw.tasks.NAME:function`."""
