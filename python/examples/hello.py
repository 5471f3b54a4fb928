"""Agent a reads memory of agent b."""
import baton
a, b, here, there = baton.Agent("a"), baton.Agent("b"), bytearray(5), bytearray(b"hello")
a.register(here), b.register(there), a.add_remote(b.metadata())
a.direct(baton.READ, [here], [there], "b").post().wait()
print(here.decode())
