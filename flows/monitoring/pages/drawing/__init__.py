"""Pictures in SVG, from points and numbers alone."""
