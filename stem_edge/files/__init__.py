"""Files: the seam to the file system, plain files, atomic writes, portable names, strict JSON.

What the files mean is known elsewhere.
"""
