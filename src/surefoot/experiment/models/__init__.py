"""Reference models by width and depth, published configurations, and models of the user's own."""
