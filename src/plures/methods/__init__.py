"""The methods, one per file: each turns the user's network into an ensemble."""

# Where each method lives. Names, not imports: the command line lists them without loading torch.
METHODS = {
    "OrthogonalDropout": "plures.methods.orthogonal_dropout.method",
    "Deterministic": "plures.methods.deterministic",
    "MCDropout": "plures.methods.mc_dropout",
    "DeepEnsemble": "plures.methods.deep_ensemble",
    "BatchEnsemble": "plures.methods.batch_ensemble",
    "MIMO": "plures.methods.mimo",
    "Masksembles": "plures.methods.masksembles",
    "PackedEnsemble": "plures.methods.packed_ensemble",
}
