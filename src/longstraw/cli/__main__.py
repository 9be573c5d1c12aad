"""`python -m longstraw.cli`, where the program is not on the path."""

from longstraw.cli import main

main()
