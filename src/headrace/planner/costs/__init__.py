"""What a step takes on devices that are not here: from a model's numbers, a device's, and how much of them is reached.

    work         what a step of a model has to do: bytes, operations, messages
    hardware     devices and links as a file tells them, with how much of their peak is reached
    roofline     seconds of a step from both
    published    profiles that others measured
    fitting      how much of a peak is reached, found in such profiles, and how wrong that is for what was left out

Pure but for the reading of files.
"""
