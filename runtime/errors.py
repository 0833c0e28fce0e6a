"""The tree of everything that can go wrong for a user.

    InferError
    ├── CheckpointError        the file is not a usable checkpoint
    │   └── UnsupportedModel   a checkpoint of a kind that this version cannot export
    ├── TokenizerError         a tokenizer description or file that cannot be used with the model
    ├── ExportError            the export cannot start or finish (output in the way, a missing package)
    ├── ParityError            a bundle does not compute what its checkpoint computes
    ├── BundleError            the bundle is damaged, incomplete, or of another format version
    ├── PromptError            a prompt that cannot be used (empty, or ids outside the vocabulary)
    ├── ContextFull            the window is full and the caller asked for that to be an error
    ├── NonFiniteLogits        the model computed NaN or infinity
    └── DraftMismatch          draft and target do not speak the same tokens

Every message is one line: what was asked, what was found, what to do. A caller's bug stays ValueError or TypeError.
"""


class InferError(Exception):
    """The base of every error that a user of `infer` can meet."""


class CheckpointError(InferError):
    """The file is not a checkpoint that can be exported."""


class UnsupportedModel(CheckpointError):
    """The checkpoint is sound, but holds a kind of model that this version cannot export."""


class TokenizerError(InferError):
    """A tokenizer description or file cannot be used with the model."""


class ExportError(InferError):
    """The export cannot start or finish."""


class ParityError(InferError):
    """A bundle does not compute what its checkpoint computes."""


class BundleError(InferError):
    """The bundle is damaged, incomplete, or of a format that this version does not read."""


class PromptError(InferError):
    """The prompt cannot be used: empty, or with ids outside the vocabulary."""


class ContextFull(InferError):
    """The window is full and `overflow="error"` was asked for."""


class NonFiniteLogits(InferError):
    """The model computed NaN or infinity."""


class DraftMismatch(InferError):
    """Draft and target do not share a tokenizer or a vocabulary."""
