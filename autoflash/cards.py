"""Cards: the GPUs of this host by torch's number, each opened in the process that will hold it."""

from typing import TYPE_CHECKING

from autoflash.errors import AutoflashError, DeviceError

if TYPE_CHECKING:
    from autoflash.trial import CudaDevice


def open_card(index: int) -> "CudaDevice":
    """The service of a worker process. Raises DeviceError for a card that does not answer."""
    from autoflash.trial import CudaDevice

    try:
        return CudaDevice(index)
    except RuntimeError as error:  # what torch says of a card that is lost or busy
        first_line = (str(error).splitlines() or [""])[0]
        raise DeviceError(f"GPU {index}: {first_line}") from None


def chosen_cards(text: str, there: int) -> tuple[int, ...]:
    """The numbers that `all` or a list such as `0,2` means where `there` cards are.

    Raises AutoflashError for a list that names none, one that is not there, or one twice.
    """
    if text == "all":
        return tuple(range(there))
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise AutoflashError(f"--gpus {text}: neither `all` nor numbers with commas between them")
    indices = tuple(int(part) for part in parts)
    if len(set(indices)) < len(indices):
        raise AutoflashError(f"--gpus {text}: names a GPU twice")
    if max(indices) >= there:
        raise DeviceError(f"--gpus {text}: GPU {max(indices)} was asked for, {there} are there")
    return indices
