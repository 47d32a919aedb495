"""Tables and pictures of finished runs; no other module of the package imports Altair."""
