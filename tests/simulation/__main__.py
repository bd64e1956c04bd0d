"""See :mod:`tests.simulation.explore`."""

from tests.simulation.explore import main

if __name__ == "__main__":  # the processes that it starts import this file too
    main()
