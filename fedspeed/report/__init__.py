"""Tables and figures. Reads run directories only, never imports torch."""
