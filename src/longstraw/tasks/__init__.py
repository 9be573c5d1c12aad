"""Tasks that ship with the package: prompts and rewards, usable as `longstraw.tasks.NAME:function`."""
