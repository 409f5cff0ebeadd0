"""A finished run behind HTTP: pictures in, answers out, and a page to try it on."""
