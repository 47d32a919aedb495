"""Role discovery: from a model to the kinds of its parameters, by module type, known class, wiring, name and override.

`find` combines `torch_layers` (type and structure), `known_classes` (class names of other libraries) and the wiring of
the model; `overrides` applies changes that the user makes.
"""
