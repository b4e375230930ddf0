//! Everything that names Burn. Run by `sweep trial` in the child.
