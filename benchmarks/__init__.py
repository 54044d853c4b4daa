"""Speed and memory on one machine; every run prints its ceiling first and ends with one JSON line. See README.md."""
