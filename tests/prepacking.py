"""What the tests of prepacked weights share."""

import warnings

from infer.runtime.generate import GenerationOptions
from infer.runtime.model import LanguageModel
from infer.runtime.sampling import SamplingOptions

FILES = {"record.json", "prepacked.bin", "prefill.onnx", "decode.onnx"}


def tokens(model):
    options = GenerationOptions(max_new_tokens=50, ignore_eos=True)
    return model.generate("the LORD", options, SamplingOptions(seed=4)).token_ids


def load(bundle, precision="fp32"):
    """Loads a model, and fails on any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return LanguageModel.load(bundle, precision)


def load_with_one_warning(bundle):
    """Returns the model and the one warning that its user sees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = LanguageModel.load(bundle)
    (warning,) = caught
    assert warning.category is UserWarning and "\n" not in str(warning.message)
    assert warning.filename == __file__  # it points at the caller of `load`
    return model, str(warning.message)


def state(folder):
    """Every file in a folder, with what tells whether it was written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def the_entry(root):
    (entry,) = root.iterdir()
    assert {path.name for path in entry.iterdir()} == FILES
    return entry
