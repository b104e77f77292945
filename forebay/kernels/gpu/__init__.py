"""The operations as Triton kernels. Importing a module of this package imports Triton; `forebay.kernels.dispatch`
does so where it is wanted."""
