"""C sources of the compiled CPU kernels; built by hatch_build.py, optional at run time."""
