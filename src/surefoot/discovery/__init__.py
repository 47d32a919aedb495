"""From a model to the roles of its parameters: by module type, by known class, by wiring, by override."""
