# The public headers: what a program that uses an installed Baton may include, and all that is installed.
# Read in this order they are a manual. They are the headers at the top of transport/, kvtransfer/ and
# collectives/, and no others are there (scripts/check_rooms): what lies deeper, or in another room, is internal.
# A header that one of these includes belongs here too (tests/package compiles each of them alone, out of the
# installed folder).
set(BATON_PUBLIC_HEADERS
  # The transport: a worker, its memory, its peers, its transfers.
  transport/worker.h
  transport/transfer.h
  transport/layout.h
  transport/region.h
  transport/pool.h
  transport/counter.h
  transport/progress_thread.h
  transport/address.h
  transport/identity.h
  transport/clock.h
  transport/decorators.h
  transport/timeline.h
  # For whoever writes a provider.
  transport/provider.h
  transport/settings.h
  # Memory of an engine's own, moved by lists of descriptors.
  kvtransfer/agent.h
  # The KV cache of a serving engine.
  kvtransfer/kv_connector.h
  kvtransfer/kv_layout.h
  kvtransfer/kv_plan.h
  kvtransfer/agent_kv.h
  kvtransfer/kv_packing.h
  kvtransfer/kv_checksums.h
  kvtransfer/kv_session.h
  kvtransfer/baton_connector.h
  # Collectives, and starting their ranks.
  collectives/endpoint.h
  collectives/communicator.h
  collectives/window.h
  collectives/experts.h
  collectives/types.h
  collectives/launch.h
  collectives/rendezvous.h)
