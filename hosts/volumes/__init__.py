"""The storage engine: blocks, packs, index, cache, export, overlay. Imports no Django."""
