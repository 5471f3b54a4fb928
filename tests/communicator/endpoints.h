// Ranks as threads of the test, each with an endpoint of its own: groups from handles.
#pragma once

#include "tests/communicator/group.h"
#include "tests/fails_with.h"

namespace baton {

inline EndpointOptions endpoint_options(const std::string& provider) {
  EndpointOptions options;
  options.worker.providers = {provider};
  options.worker.key = test_key();
  return options;
}

inline std::vector<std::shared_ptr<Endpoint>> open_endpoints(size_t count,
                                                             const std::string& provider,
                                                             bool background = false) {
  std::vector<std::shared_ptr<Endpoint>> endpoints;
  for (size_t i = 0; i < count; ++i) {
    EndpointOptions options = endpoint_options(provider);
    options.background = background;
    endpoints.push_back(must(Endpoint::open(options)));
  }
  return endpoints;
}

inline std::vector<Handle> handles_of(const std::vector<std::shared_ptr<Endpoint>>& endpoints) {
  std::vector<Handle> handles;
  // As they come from elsewhere.
  for (const auto& endpoint : endpoints) {
    handles.push_back(*Handle::decode(endpoint->handle().bytes()));
  }
  return handles;
}

// A handle's bytes, of which one is another and the sum at their end fits.
inline std::string with_byte_raised(const Handle& handle, size_t at) {
  std::string bytes = handle.bytes();
  bytes[at] = static_cast<char>(bytes[at] + 1);
  uint64_t hash = 14695981039346656037u;
  for (size_t i = 0; i < Handle::kBytes - sizeof(uint32_t); ++i) {
    hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 1099511628211u;
  }
  const auto check = static_cast<uint32_t>(hash ^ hash >> 29);
  std::memcpy(bytes.data() + Handle::kBytes - sizeof check, &check, sizeof check);
  return bytes;
}

inline GroupOptions group_options(uint64_t uuid) {
  GroupOptions options;
  options.uuid = uuid;
  options.slot_bytes = 64 << 10;
  options.timeout = patient(std::chrono::seconds(60));
  return options;
}

// Calls body(rank) on a thread for each and waits for all of them.
inline void on_threads(size_t count, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < static_cast<int>(count); ++i) {
    threads.push_back(rank_thread(i, [&body, i] { body(i); }));
  }
  for (std::thread& thread : threads) thread.join();
}

// Calls body(communicator) at each rank of a group of these endpoints.
inline void run_endpoints(const std::vector<std::shared_ptr<Endpoint>>& endpoints, uint64_t uuid,
                          const std::function<void(Communicator&)>& body) {
  const std::vector<Handle> handles = handles_of(endpoints);
  on_threads(endpoints.size(), [&](int rank) {
    auto comm = Communicator::create(endpoints[rank], handles, group_options(uuid));
    ASSERT_TRUE(comm.ok()) << "rank " << rank << ": " << comm.status();
    body(**comm);
  });
}

// The sum over the group of (1 + rank) * scale, by an all_reduce of `count` elements; -1: it
// failed, or elements differ.
inline float sum_of(Communicator& comm, float scale = 1, size_t count = 1000) {
  std::vector<float> data(count, static_cast<float>(comm.rank() + 1) * scale);
  const absl::Status status =
      comm.all_reduce(data.data(), data.data(), count, DataType::kF32, ReduceOp::kSum);
  EXPECT_TRUE(status.ok()) << "rank " << comm.rank() << " of " << comm.name() << ": " << status;
  if (!status.ok() || data.front() != data.back()) return -1;
  return data.front();
}
inline float expected_sum(int ranks, float scale = 1) {
  return static_cast<float>(ranks * (ranks + 1)) / 2 * scale;
}

// A group of these endpoints that has made a call.
inline std::vector<std::unique_ptr<Communicator>> group_of(
    const std::vector<std::shared_ptr<Endpoint>>& endpoints, uint64_t uuid) {
  std::vector<std::unique_ptr<Communicator>> comms(endpoints.size());
  const std::vector<Handle> handles = handles_of(endpoints);
  on_threads(endpoints.size(), [&](int rank) {
    comms[rank] = *Communicator::create(endpoints[rank], handles, group_options(uuid));
    EXPECT_EQ(sum_of(*comms[rank]), expected_sum(static_cast<int>(endpoints.size())));
  });
  return comms;
}

}  // namespace baton
