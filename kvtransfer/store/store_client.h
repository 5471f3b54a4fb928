// The tier in another process: an engine's way to a KV store (kv_store.h), over Baton's transport.
//
// It calls the store, and calls it again while it is away: an engine starts without its store, and
// goes on when that ends. A lookup that is not answered in time makes the tier silent: it has
// nothing until the store speaks again. Found records are leased for twice as long as a load may
// take, and used for new loads during the first half of that. Whatever the store does, bytes are
// taken only where their sums, seeded with the key that was wanted, are right.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "kvtransfer/tiers/peer_tier.h"
#include "transport/clock.h"
#include "transport/identity.h"
#include "transport/settings.h"

namespace baton::kvtransfer::store {

struct StoreClientOptions {
  std::string store;                   // HOST:PORT, or an encoded Address
  std::string name = "kv-tiers";       // told to the store
  std::vector<std::string> providers;  // by name; empty: all
  std::optional<ClusterKey> key;       // default: ClusterKey::for_this_user()
  SettingValues settings;
  Time lookup_timeout = patient(std::chrono::milliseconds(200));
  Time load_timeout = patient(std::chrono::seconds(5));  // of a load, at most
  size_t staging_bytes = 16 << 20;                       // registered, through which records pass
  const Clock* clock = nullptr;                          // default: Clock::steady()
};

// InvalidArgument: an address that cannot be one. That no store is there is no error.
tiers::PeerTierFactory store_client(StoreClientOptions options);

}  // namespace baton::kvtransfer::store
