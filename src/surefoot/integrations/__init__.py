"""Other libraries' models; each file needs its library, and nothing else in the package needs these files."""
