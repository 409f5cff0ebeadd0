"""An HTTP server for a finished run: images in, predictions out, and a page for trying it."""
