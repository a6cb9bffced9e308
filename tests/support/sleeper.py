"""A program that sleeps; `python -m` runs it."""

import time

if __name__ == "__main__":
    time.sleep(60)
