"""The one seam to the file system.

Reading and writing of plain files, whole or not at all; names that mean the same everywhere; strict JSON;
checksums. What the files mean is known elsewhere.
"""
