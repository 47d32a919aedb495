"""Other libraries' trainers; each module needs its library, and nothing else in the package imports it."""
