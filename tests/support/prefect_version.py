"""The installed Prefect, where the tests of one version differ from those of another."""

import prefect
from packaging.version import Version

IS_3_9 = Version(prefect.__version__) >= Version("3.9")
