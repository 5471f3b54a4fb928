// Ranks as threads of the test, each driving the plugin file as NCCL does: a thread that calls, and
// makes progress while it waits for others.
#pragma once

#include <dlfcn.h>

#include <barrier>
#include <cstring>

#include "plugins/nccl/abi_rma.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::nccl {

// The plugin file, opened once. BATON_NCCL_PLUGIN: another one.
inline void* plugin_file() {
  static void* const file = [] {
    const char* const given = std::getenv("BATON_NCCL_PLUGIN");
    void* const opened = dlopen(given == nullptr ? BATON_NCCL_PLUGIN_FILE : given, RTLD_NOW);
    if (opened == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    return opened;
  }();
  return file;
}
template <typename Table>
const Table* table_of(const char* name) {
  return static_cast<const Table*>(dlsym(plugin_file(), name));
}

// What all ranks of a group share.
class RmaRanks {
 public:
  explicit RmaRanks(int ranks)
      : handles_(static_cast<size_t>(ranks)), communicator_(next_communicator()) {}

  int count() const { return static_cast<int>(handles_.size()); }
  uint64_t communicator() const { return communicator_; }
  char* handle(int rank) { return handles_[static_cast<size_t>(rank)].data(); }
  // Where rank n stands: how many barriers it has come to.
  std::atomic<int> came{0};

 private:
  static uint64_t next_communicator() {
    static std::atomic<uint64_t> next{1};
    return next++;
  }
  std::vector<std::array<char, kHandleBytes>> handles_;
  const uint64_t communicator_;
};

// One rank. `Table` is any version's.
template <typename Table>
class RmaRank {
 public:
  RmaRank(const Table& of, RmaRanks& ranks, int number) : table(of), rank(number), ranks_(ranks) {}
  ~RmaRank() {
    if (context != nullptr) barrier();
    leave();
    if (instance_ == nullptr) return;
    EXPECT_EQ(table.finalize(instance_), Result::kSuccess);
  }
  // As NCCL does: memory, contexts, comm.
  void leave() {
    for (void* one : memory_) EXPECT_EQ(table.deregister(comm, one), Result::kSuccess);
    memory_.clear();
    if (context != nullptr) table.destroy_context(std::exchange(context, nullptr));
    if (comm != nullptr) {
      EXPECT_EQ(table.close_comm(std::exchange(comm, nullptr)), Result::kSuccess);
    }
  }
  void* instance() const { return instance_; }
  RmaRank(const RmaRank&) = delete;
  RmaRank& operator=(const RmaRank&) = delete;

  void connect() {
    int count = 0;
    ASSERT_EQ(table.init(&instance_, ranks_.communicator(), nullptr), Result::kSuccess);
    ASSERT_EQ(table.devices(&count), Result::kSuccess);
    ASSERT_GT(count, 0);
    void* listener = nullptr;
    ASSERT_EQ(table.listen(instance_, 0, ranks_.handle(rank), &listener), Result::kSuccess);
    barrier();
    std::vector<void*> handles;
    for (int of = 0; of < ranks_.count(); ++of) handles.push_back(ranks_.handle(of));
    // NCCL passes its net's context here.
    ASSERT_EQ(table.connect(nullptr, handles.data(), ranks_.count(), rank, listener, &comm),
              Result::kSuccess);
    ASSERT_EQ(table.close_listen(listener), Result::kSuccess);
  }
  void make_context(int contexts) {
    if constexpr (std::is_same_v<Table, RmaV13>) {
      GinConfigV13 config{.contexts = contexts, .traffic_class = -1};
      NetDeviceHandle* device = nullptr;
      ASSERT_EQ(table.create_context(comm, &config, &context, &device), Result::kSuccess);
      ASSERT_EQ(device->device_type, kGinProxyDevice);
    } else {
      RmaConfigV14 config{.contexts = contexts, .traffic_class = -1, .rank_stride = 1};
      ASSERT_EQ(table.create_context(comm, &config, &context), Result::kSuccess);
    }
  }
  // Collective.
  void* add(std::vector<std::byte>& data) { return add(data.data(), data.size(), kHostPointer); }
  void* add(void* data, size_t size, int type) {
    void* memory = nullptr;
    if constexpr (std::is_same_v<Table, RmaV13>) {
      void* for_device = nullptr;
      EXPECT_EQ(table.register_memory(comm, data, size, type, 0, &memory, &for_device),
                Result::kSuccess);
      EXPECT_EQ(for_device, memory);
    } else {
      EXPECT_EQ(table.register_memory(comm, data, size, type, 0, &memory), Result::kSuccess);
    }
    memory_.push_back(memory);
    return memory;
  }

  void* put(int number, uint64_t from_offset, void* from, size_t size, uint64_t to_offset, void* to,
            int to_rank) {
    void* request = nullptr;
    EXPECT_EQ(call(table.put, number, from_offset, from, size, to_offset, to, to_rank, &request),
              Result::kSuccess);
    EXPECT_NE(request, nullptr);
    return request;
  }
  void* get(int number, uint64_t remote_offset, void* remote, size_t size, uint64_t local_offset,
            void* local, int of_rank) {
    void* request = nullptr;
    EXPECT_EQ(call(table.get, number, remote_offset, remote, size, local_offset, local, of_rank,
                   &request),
              Result::kSuccess);
    EXPECT_NE(request, nullptr);
    return request;
  }
  struct Signal {
    void* words = nullptr;
    uint64_t offset = 0, value = 0;
    uint32_t operation = kSignalInc;
    bool strong = false;
  };
  void* put_signal(int number, uint64_t from_offset, void* from, size_t size, uint64_t to_offset,
                   void* to, int to_rank, const Signal& signal) {
    void* request = nullptr;
    EXPECT_EQ(
        try_put_signal(number, from_offset, from, size, to_offset, to, to_rank, signal, &request),
        Result::kSuccess);
    EXPECT_NE(request, nullptr);
    return request;
  }
  Result try_put_signal(int number, uint64_t from_offset, void* from, size_t size,
                        uint64_t to_offset, void* to, int to_rank, const Signal& signal,
                        void** request) {
    const auto to_u = static_cast<uint32_t>(to_rank);
    if constexpr (std::is_same_v<Table, RmaV13>) {
      return table.put_signal(context, number, from_offset, from, size, to_offset, to, to_u,
                              signal.offset, signal.words, signal.value, signal.operation, request);
    } else if constexpr (std::is_same_v<Table, RmaV14>) {
      return table.put_signal(context, number, from_offset, from, size, to_offset, to, to_u,
                              signal.offset, signal.words, signal.value, signal.operation,
                              signal.strong, request);
    } else {
      return table.put_signal(context, number, from_offset, from, size, to_offset, to, to_u,
                              signal.offset, signal.words, signal.value, signal.operation,
                              signal.strong, 0, request);
    }
  }
  void* flush(int number, void* memory, int to_rank) {
    void* request = nullptr;
    EXPECT_EQ(table.flush(context, number, memory, static_cast<uint32_t>(to_rank), &request),
              Result::kSuccess);
    EXPECT_NE(request, nullptr);
    return request;
  }
  bool test(void* request) {
    int done = 0;
    EXPECT_EQ(table.test(comm, request, &done), Result::kSuccess);
    return done != 0;
  }
  void finish(void* request) {
    if (request != nullptr) until([&] { return test(request); }, [] {});
  }
  void progress() { EXPECT_EQ(table.progress(context), Result::kSuccess); }

  // All ranks are here; makes progress meanwhile, as NCCL's thread does.
  void barrier() {
    const int wanted = ++barriers_ * ranks_.count();
    ++ranks_.came;
    until([&] { return ranks_.came.load() >= wanted; },
          [&] {
            if (context != nullptr) progress();
            std::this_thread::yield();
          });
  }
  // The word, once it is at least this; and how far it got.
  uint64_t wait_word(const std::vector<std::byte>& words, uint64_t at_least, size_t offset = 0) {
    auto& word = const_cast<uint64_t&>(*reinterpret_cast<const uint64_t*>(words.data() + offset));
    const std::atomic_ref<uint64_t> now(word);
    until([&] { return now.load(std::memory_order_acquire) >= at_least; }, [&] { progress(); });
    return now.load();
  }

  const Table& table;
  const int rank;
  void* comm = nullptr;
  void* context = nullptr;

 private:
  template <typename Function>
  Result call(Function function, int number, uint64_t offset, void* one, size_t size,
              uint64_t other_offset, void* other, int of_rank, void** request) {
    const auto of = static_cast<uint32_t>(of_rank);
    if constexpr (std::is_same_v<Function, RmaPutV15>) {
      return function(context, number, offset, one, size, other_offset, other, of, 0, request);
    } else {
      return function(context, number, offset, one, size, other_offset, other, of, request);
    }
  }

  RmaRanks& ranks_;
  void* instance_ = nullptr;
  std::vector<void*> memory_;
  int barriers_ = 0;
};

// Calls body(rank) on a thread for each rank, which is connected and has so many contexts.
template <typename Table, typename Body>
void run_ranks(const Table& table, int count, int contexts, Body&& body) {
  RmaRanks ranks(count);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      RmaRank<Table> self(table, ranks, rank);
      self.connect();
      if (testing::Test::HasFatalFailure()) return;
      self.make_context(contexts);
      body(self);
    });
  }
  for (std::thread& thread : threads) thread.join();
}
template <typename Table, typename Body>
void run_ranks(const char* symbol, int count, int contexts, Body&& body) {
  const Table* const table = table_of<Table>(symbol);
  ASSERT_NE(table, nullptr) << symbol;
  run_ranks(*table, count, contexts, body);
}

inline void fill(std::byte* data, size_t size, unsigned seed) {
  for (size_t i = 0; i < size; ++i) data[i] = static_cast<std::byte>((seed + i) & 255);
}
inline bool filled(const std::byte* data, size_t size, unsigned seed) {
  for (size_t i = 0; i < size; ++i) {
    if (data[i] != static_cast<std::byte>((seed + i) & 255)) return false;
  }
  return true;
}
inline bool all_are(const std::byte* data, size_t size, std::byte value) {
  return std::all_of(data, data + size, [&](std::byte one) { return one == value; });
}

// What most tests begin with: memory to put from, to put to, and for signals. Collective.
template <typename Table>
struct Memory {
  static constexpr size_t kSize = 4096;
  static constexpr unsigned kSeed = 7;  // of what is put

  explicit Memory(RmaRank<Table>& self, size_t size = kSize)
      : from(size),
        to(size),
        words(64),
        source(self.add(from)),
        target(self.add(to)),
        signals(self.add(words)) {
    fill(from.data(), size, kSeed);
    self.barrier();
  }
  std::vector<std::byte> from, to, words;
  void* const source;
  void* const target;
  void* const signals;
};

}  // namespace baton::nccl
