"""Tables and pictures of finished runs; only these modules import matplotlib."""
