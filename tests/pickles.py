"""A pickle that runs code when it is loaded, as a hostile one would."""

import os


class RunsCode:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self._folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self._folder,)
