"""The SDK's vocabulary: what clients send and expect, and its translation to bus messages.

Pure functions over bytes and structs: nothing here knows HTTP or does I/O.
"""
