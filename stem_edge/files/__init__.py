"""Files: the seam to the file system, plain files, atomic writes, names, JSON.

What the files mean is known elsewhere.
"""
