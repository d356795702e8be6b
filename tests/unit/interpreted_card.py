"""A device whose checks are real, in triton's interpreter, and whose times are made up."""

import os


def interpreted_card():
    """Made in a process that has not imported triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    from fake_device import GPU, FakeDevice

    from autoflash.predict import InterpretedDevice

    class InterpretedCard(FakeDevice):
        def check(self, problem, config, seed, stage=None):
            return InterpretedDevice(GPU).check(problem, config, seed, stage)

    return InterpretedCard()
