// The RMA plugin beyond RCCL's list: every version, a rank's puts to itself, more requests than
// there is room for, who leaves, and bad input.
#include "tests/nccl_rma/rma_rig.h"

namespace baton::nccl {
namespace {

using Bytes = std::vector<std::byte>;
constexpr size_t kSize = Memory<RmaV16>::kSize;

template <typename Table>
void put_signal_and_get(const char* symbol) {
  run_ranks<Table>(symbol, 3, 2, [](RmaRank<Table>& self) {
    Memory<Table> memory(self);
    const int to = (self.rank + 1) % 3;
    self.finish(self.put_signal(
        1, 0, memory.source, kSize, 0, memory.target, to,
        {.words = memory.signals, .value = 5, .operation = kSignalAdd, .strong = true}));
    EXPECT_EQ(self.wait_word(memory.words, 1), 5u);
    EXPECT_TRUE(filled(memory.to.data(), kSize, 7));
    std::fill(memory.from.begin(), memory.from.end(), std::byte{});
    self.finish(self.put(0, 0, memory.source, 0, 0, memory.target, to));  // no bytes
    self.finish(self.get(0, 8, memory.target, 100, 16, memory.source, to));
    self.finish(self.flush(0, memory.target, to));
    EXPECT_TRUE(filled(memory.from.data() + 16, 100, 7 + 8));
    bool failed = true;
    EXPECT_EQ(self.table.query_last_error(self.context, &failed), Result::kSuccess);
    EXPECT_FALSE(failed);
    self.barrier();
  });
}

// Promise(nccl): Every version of NCCL's RMA interface does the same | v13 under both of its names,
//   v14, v15 and v16, three ranks of one process
TEST(Rma, EveryVersionPutsSignalsAndGets) {
  put_signal_and_get<RmaV13>("ncclGinPlugin_v13");
  put_signal_and_get<RmaV13>("ncclRmaPlugin_v13");
  put_signal_and_get<RmaV14>("ncclRmaPlugin_v14");
  put_signal_and_get<RmaV15>("ncclRmaPlugin_v15");
  put_signal_and_get<RmaV16>("ncclRmaPlugin_v16");
}

TEST(Rma, SaysWhatDevicesItHas) {
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 1, 1, [](RmaRank<RmaV16>& self) {
    PropertiesV12 properties{};
    ASSERT_EQ(self.table.properties(0, &properties), Result::kSuccess);
    EXPECT_EQ(properties.device_type, kHostDevice);
    EXPECT_NE(properties.pointers & kHostPointer, 0);
    EXPECT_GE(properties.max_receives, 1);
    RmaPropertiesV16 rma{true};
    ASSERT_EQ(self.table.rma_properties(self.comm, &rma), Result::kSuccess);
    EXPECT_FALSE(rma.any_signal_flushes_all);
    const auto* v13 = table_of<RmaV13>("ncclGinPlugin_v13");
    ASSERT_EQ(v13->properties(0, &properties), Result::kSuccess);
    EXPECT_EQ(properties.device_type, kGinProxyDevice);  // or NCCL refuses it
  });
}

// NCCL flushes by putting 8 bytes to its own rank.
TEST(Rma, ARankPutsToItself) {
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 2, 1, [](RmaRank<RmaV16>& self) {
    Memory memory(self);
    self.finish(self.put_signal(0, 1, memory.source, 8, 9, memory.target, self.rank,
                                {.words = memory.signals, .offset = 8}));
    EXPECT_TRUE(filled(memory.to.data() + 9, 8, 7 + 1));
    EXPECT_EQ(self.wait_word(memory.words, 1, 8), 1u);
    self.finish(self.get(0, 9, memory.target, 8, 100, memory.source, self.rank));
    EXPECT_TRUE(filled(memory.from.data() + 100, 8, 7 + 1));
    self.barrier();
  });
}

// Promise(nccl): An RMA request is never NULL | 6,000 puts that none has tested, more than a group
//   has works
TEST(Rma, MoreRequestsThanThereIsRoomFor) {
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 2, 1, [](RmaRank<RmaV16>& self) {
    Memory memory(self, size_t{6000} * 8);
    std::vector<void*> requests;
    for (size_t i = 0; i < 6000 && self.rank == 0; ++i) {
      void* request = nullptr;
      // All but the last say that more follows.
      ASSERT_EQ(self.table.put_signal(self.context, 0, i * 8, memory.source, 8, i * 8,
                                      memory.target, 1, 0, memory.signals, 0, kSignalInc, true,
                                      i < 5999 ? kAggregate : 0, &request),
                Result::kSuccess);
      ASSERT_NE(request, nullptr);
      requests.push_back(request);
    }
    for (auto request = requests.rbegin(); request != requests.rend(); ++request) {
      self.finish(*request);
    }
    if (self.rank == 1) {
      EXPECT_EQ(self.wait_word(memory.words, 6000), 6000u);
      EXPECT_TRUE(filled(memory.to.data(), memory.to.size(), 7));
    }
    self.barrier();
  });
}

// Words are numbers modulo 2^64, and may be set back between signals.
TEST(Rma, WordsWrapAndAreSetBack) {
  run_ranks<RmaV14>("ncclRmaPlugin_v14", 2, 1, [](RmaRank<RmaV14>& self) {
    Memory memory(self);
    auto& word = *reinterpret_cast<uint64_t*>(memory.words.data());
    for (const uint64_t add : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{3}}) {
      if (self.rank == 0) {
        self.finish(
            self.put_signal(0, 0, nullptr, 0, 0, nullptr, 1,
                            {.words = memory.signals, .value = add, .operation = kSignalAdd}));
      } else {
        EXPECT_EQ(self.wait_word(memory.words, 1), add);
        std::atomic_ref<uint64_t>(word).store(0);
      }
      self.barrier();
    }
    if (self.rank == 0) {
      for (const uint64_t add : {~uint64_t{0}, uint64_t{5}}) {
        self.finish(
            self.put_signal(0, 0, nullptr, 0, 0, nullptr, 1,
                            {.words = memory.signals, .value = add, .operation = kSignalAdd}));
      }
    } else {
      const std::atomic_ref<uint64_t> now(word);
      until([&] { return now.load() == 4; }, [&] { self.progress(); });
    }
    self.barrier();
  });
}

// --- what goes wrong -----------------------------------------------------------------------------

// Promise(nccl): RMA calls that make no sense get NCCL's error code, and break nothing | bounds,
//   ranks, contexts, handles and types, each refused before a byte moves
TEST(Rma, RefusesWhatMakesNoSense) {
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 2, 2, [](RmaRank<RmaV16>& self) {
    Memory memory(self);
    const RmaV16& t = self.table;
    void* const context = self.context;
    void* const from = memory.source;
    void* const to = memory.target;
    void* const words = memory.signals;
    void* request = nullptr;
    const auto put = [&](int number, uint64_t from_offset, void* a, size_t size, uint64_t to_offset,
                         void* b, uint32_t rank) {
      return t.put(context, number, from_offset, a, size, to_offset, b, rank, 0, &request);
    };
    const auto signal = [&](uint64_t offset, void* w, uint32_t rank) {
      return t.put_signal(context, 0, 0, from, 8, 0, to, rank, offset, w, 0, kSignalInc, true, 0,
                          &request);
    };
    struct Case {
      const char* what;
      Result result;
    };
    char other[kHandleBytes] = {};
    char* handles[] = {other, other};
    void* none[] = {nullptr, nullptr};
    void* out = nullptr;
    int done = 0;
    RmaConfigV14 config{.contexts = 1};
    Bytes small(8);
    void* const little = self.add(small);
    request = self.put(0, 0, from, 8, 0, to, 1 - self.rank);
    EXPECT_EQ(t.test(self.comm, request, nullptr), Result::kInvalidArgument);
    self.finish(std::exchange(request, nullptr));
    const Case cases[] = {
        {"context 2", put(2, 0, from, 8, 0, to, 1)},
        {"context -1", put(-1, 0, from, 8, 0, to, 1)},
        {"rank 2", put(0, 0, from, 8, 0, to, 2)},
        {"a huge rank", put(0, 0, from, 8, 0, to, ~uint32_t{0})},
        {"too many bytes", put(0, 0, from, kSize + 1, 0, to, 1)},
        {"more than the source has", put(0, 0, little, 16, 0, to, 1)},
        {"a huge size", put(0, 8, from, ~size_t{0}, 0, to, 1)},
        {"outside of the source", put(0, kSize - 7, from, 8, 0, to, 1)},
        {"outside of the target", put(0, 0, from, 8, kSize - 7, to, 1)},
        {"a huge offset", put(0, 0, from, 8, ~uint64_t{0}, to, 1)},
        {"no source", put(0, 0, nullptr, 8, 0, to, 1)},
        {"no target", put(0, 0, from, 8, 0, nullptr, 1)},
        {"no context", t.put(nullptr, 0, 0, from, 8, 0, to, 1, 0, &request)},
        {"no request", t.put(context, 0, 0, from, 8, 0, to, 1, 0, nullptr)},
        {"no words", signal(0, nullptr, 1)},
        {"outside of the words", signal(60, words, 1)},
        {"a huge word", signal(~uint64_t{0} - 3, words, 1)},
        {"a word that is not aligned", signal(4, words, 1)},
        {"a word of rank 2", signal(0, words, 2)},
        {"get out of nothing", t.get(context, 0, 0, nullptr, 8, 0, from, 1, 0, &request)},
        {"get outside", t.get(context, 0, kSize, to, 8, 0, from, 1, 0, &request)},
        {"flush to rank 2", t.flush(context, 0, to, 2, &request)},
        {"test of nothing", t.test(self.comm, nullptr, &done)},
        {"memory of no type", t.register_memory(self.comm, other, 8, 77, 0, &out)},
        {"a foreign handle", t.deregister(self.comm, other)},
        {"no comm", t.register_memory(nullptr, other, 8, kHostPointer, 0, &out)},
        {"no handles", t.connect(nullptr, nullptr, 2, 0, &out, &out)},
        {"no listener", t.connect(nullptr, reinterpret_cast<void**>(handles), 2, 0, nullptr, &out)},
        {"no device", t.listen(self.instance(), 99, other, &out)},
        {"listen, no handle", t.listen(self.instance(), 0, nullptr, &out)},
        {"listen, no place", t.listen(self.instance(), 0, other, nullptr)},
        {"listen, no context", t.listen(nullptr, 0, other, &out)},
        {"connect, no handle", t.connect(nullptr, none, 2, 0, &out, &out)},
        {"connect, no place",
         t.connect(nullptr, reinterpret_cast<void**>(handles), 2, 0, &out, nullptr)},
        {"init, no place", t.init(nullptr, 1, nullptr)},
        {"devices, no place", t.devices(nullptr)},
        {"properties, no place", t.properties(0, nullptr)},
        {"context, no place", t.create_context(self.comm, &config, nullptr)},
        {"register, no place", t.register_memory(self.comm, other, 8, kHostPointer, 0, nullptr)},
        {"error, no place", t.query_last_error(context, nullptr)},
    };
    for (const Case& c : cases) EXPECT_EQ(c.result, Result::kInvalidArgument) << c.what;
    EXPECT_EQ(request, nullptr);
    RmaConfigV14 no_contexts{.contexts = 0};
    EXPECT_EQ(t.create_context(self.comm, &no_contexts, &out), Result::kInvalidArgument);
    if (self.rank == 0) {
      std::vector<void*> contexts;
      Result result = Result::kSuccess;
      while (contexts.size() < 5'000 &&
             (result = t.create_context(self.comm, &config, &out)) == Result::kSuccess) {
        contexts.push_back(std::exchange(out, nullptr));
      }
      EXPECT_EQ(result, Result::kSystemError) << "too many";
      for (void* one : contexts) EXPECT_EQ(t.destroy_context(one), Result::kSuccess);
    }
    self.barrier();
    // And all goes on.
    request = self.put_signal(0, 0, from, 8, 0, to, 1 - self.rank, {.words = words});
    self.finish(request);
    EXPECT_EQ(t.test(self.comm, request, &done), Result::kInvalidArgument) << "a second time";
    EXPECT_EQ(self.wait_word(memory.words, 1), 1u);
    self.barrier();
  });
}

// Promise(nccl): What NCCL has given back, or has of another comm, is an error of every RMA call
//   with it | contexts, memory, requests and comms: made up, gone, another rank's of this process,
//   and those of a comm that is closed
TEST(Rma, WhatIsGoneOrAnothersIsAnError) {
  struct Handles {
    void *comm = nullptr, *context = nullptr, *memory = nullptr, *request = nullptr;
  };
  std::array<Handles, 2> of;
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 2, 1, [&](RmaRank<RmaV16>& self) {
    const RmaV16& t = self.table;
    Memory memory(self);
    const Handles own{self.comm, self.context, memory.source};
    const auto to = static_cast<uint32_t>(1 - self.rank);
    char text[kHandleBytes] = {};
    void* handles[] = {text};
    void* out = nullptr;
    int done = 0;
    const auto put = [&](void* context, void* a, void* b) {
      return t.put(context, 0, 0, a, 8, 0, b, to, 0, &out);
    };
    const auto get = [&](void* context, void* a, void* b) {
      return t.get(context, 0, 0, a, 8, 0, b, to, 0, &out);
    };
    const auto signal = [&](void* context, void* a, void* b, void* words) {
      return t.put_signal(context, 0, 0, a, 8, 0, b, to, 0, words, 0, kSignalInc, true, 0, &out);
    };
    // One of them at a time; all else is right.
    const auto refused = [&](const char* what, const Handles& bad, bool others) {
      void* const right = own.memory;
      std::vector<std::pair<const char*, Result>> results = {
          {"put, context", put(bad.context, right, right)},
          {"put, source", put(own.context, bad.memory, right)},
          {"put, target", put(own.context, right, bad.memory)},
          {"signal, context", signal(bad.context, right, right, right)},
          {"signal, source", signal(own.context, bad.memory, right, right)},
          {"signal, target", signal(own.context, right, bad.memory, right)},
          {"signal, words", signal(own.context, right, right, bad.memory)},
          {"get, context", get(bad.context, right, right)},
          {"get, source", get(own.context, bad.memory, right)},
          {"get, target", get(own.context, right, bad.memory)},
          {"flush, context", t.flush(bad.context, 0, right, to, &out)},
          {"flush, memory", t.flush(own.context, 0, bad.memory, to, &out)},
          {"deregister", t.deregister(own.comm, bad.memory)},
          {"deregister, comm", t.deregister(bad.comm, right)},
          {"test", t.test(own.comm, bad.request, &done)},
      };
      if (!others) {  // what another rank may do with its own
        bool failed = false;
        RmaConfigV14 config{.contexts = 1};
        for (const auto& more : std::initializer_list<std::pair<const char*, Result>>{
                 {"progress", t.progress(bad.context)},
                 {"query", t.query_last_error(bad.context, &failed)},
                 {"destroy", t.destroy_context(bad.context)},
                 {"new context", t.create_context(bad.comm, &config, &out)},
                 {"register", t.register_memory(bad.comm, &failed, 1, kHostPointer, 0, &out)},
                 {"connect", t.connect(nullptr, handles, 1, 0, bad.comm, &out)},
                 {"listen", t.listen(bad.context, 0, text, &out)},
                 {"close", t.close_comm(bad.comm)},
                 {"close listener", t.close_listen(bad.comm)}}) {
          results.push_back(more);
        }
      }
      for (const auto& [call, result] : results) {
        EXPECT_EQ(result, Result::kInvalidArgument) << what << ": " << call;
      }
      EXPECT_EQ(out, nullptr) << what;
    };
    // Numbers that are not given yet.
    const auto beside = [](void* handle) { return static_cast<char*>(handle) + 500; };
    refused("an address", {text, text, text, text}, false);
    refused("a number", {beside(own.comm), beside(own.context), beside(own.memory), text}, false);
    refused("of another kind", {own.memory, own.comm, own.context, own.comm}, false);

    // Gone.
    Handles gone{nullptr};
    Bytes more(kSize);
    RmaConfigV14 config{.contexts = 1};
    ASSERT_EQ(t.create_context(self.comm, &config, &gone.context), Result::kSuccess);
    ASSERT_EQ(t.destroy_context(gone.context), Result::kSuccess);
    ASSERT_EQ(t.register_memory(self.comm, more.data(), kSize, kHostPointer, 0, &gone.memory),
              Result::kSuccess);
    self.barrier();
    ASSERT_EQ(t.deregister(self.comm, gone.memory), Result::kSuccess);
    gone.request = self.put(0, 0, memory.source, 8, 0, memory.target, 1 - self.rank);
    self.finish(gone.request);
    gone.comm = text;
    refused("gone", gone, false);

    // Another's, which is right there.
    Handles& mine = of[static_cast<size_t>(self.rank)];
    mine = own;
    mine.request = self.put(0, 0, memory.source, 8, 0, memory.target, 1 - self.rank);
    self.barrier();
    refused("another's", of[to], true);
    self.barrier();
    self.finish(mine.request);
    self.finish(self.put_signal(0, 0, memory.source, 8, 0, memory.target, 1 - self.rank,
                                {.words = memory.signals}));
    EXPECT_EQ(self.wait_word(memory.words, 1), 1u);

    // Its comm is closed.
    Handles closed = own;
    closed.request = self.put(0, 0, memory.source, 8, 0, memory.target, 1 - self.rank);
    self.barrier();
    void* const context = std::exchange(self.context, nullptr);  // not destroyed before
    self.leave();
    refused("closed", {closed.comm, closed.context, closed.memory, closed.request}, true);
    EXPECT_EQ(t.progress(context), Result::kInvalidArgument);
    EXPECT_EQ(t.destroy_context(context), Result::kSuccess);
    refused("closed and destroyed", closed, false);
  });
}

TEST(Rma, RefusesHandlesThatAreNotItsOwn) {
  const auto* table = table_of<RmaV16>("ncclRmaPlugin_v16");
  void* instance = nullptr;
  void* listener = nullptr;
  void* comm = nullptr;
  char own[kHandleBytes], other[kHandleBytes] = "of another plugin";
  ASSERT_EQ(table->init(&instance, 77, nullptr), Result::kSuccess);
  ASSERT_EQ(table->listen(instance, 0, own, &listener), Result::kSuccess);
  void* handles[] = {own, other};
  EXPECT_EQ(table->connect(instance, handles, 2, 0, listener, &comm), Result::kInvalidArgument);
  EXPECT_EQ(table->connect(instance, handles, 2, 1, listener, &comm), Result::kInvalidArgument);
  EXPECT_EQ(table->connect(instance, handles, 2, 2, listener, &comm), Result::kInvalidArgument);
  EXPECT_EQ(table->connect(instance, handles, 0, 0, listener, &comm), Result::kInvalidArgument);
  EXPECT_EQ(table->connect(instance, handles, 2, -1, listener, &comm), Result::kInvalidArgument);
  void* twice[] = {own, own};
  EXPECT_EQ(table->connect(instance, twice, 2, 0, listener, &comm), Result::kInvalidArgument);
  void* again = nullptr;  // another listener's handle for this rank
  ASSERT_EQ(table->listen(instance, 0, other, &again), Result::kSuccess);
  void* one[] = {other};
  EXPECT_EQ(table->connect(instance, one, 1, 0, listener, &comm), Result::kInvalidArgument);
  EXPECT_EQ(table->close_listen(again), Result::kSuccess);
  EXPECT_EQ(comm, nullptr);
  // Listening for nothing is no fault.
  EXPECT_EQ(table->close_listen(listener), Result::kSuccess);
  EXPECT_EQ(table->close_listen(listener), Result::kInvalidArgument);
  EXPECT_EQ(table->close_comm(listener), Result::kInvalidArgument);
  EXPECT_EQ(table->destroy_context(own), Result::kInvalidArgument);
  EXPECT_EQ(table->finalize(instance), Result::kSuccess);
  EXPECT_EQ(table->finalize(nullptr), Result::kSuccess);
}

// A rank that closes its comm is an error to who puts to it then, and no hang.
TEST(Rma, WhoLeftIsARemoteError) {
  std::atomic<bool> left{false};
  run_ranks<RmaV16>("ncclRmaPlugin_v16", 2, 1, [&](RmaRank<RmaV16>& self) {
    Memory memory(self);
    self.barrier();
    if (self.rank == 1) {
      self.leave();
      left = true;
      return;
    }
    until([&] { return left.load(); }, [&] { self.table.progress(self.context); });
    Result result = Result::kSuccess;
    until([&] {
      void* request = nullptr;
      result =
          self.table.put(self.context, 0, 0, memory.source, 8, 0, memory.target, 1, 0, &request);
      for (int done = 0; result == Result::kSuccess && done == 0;) {
        result = self.table.test(self.comm, request, &done);
      }
      return result != Result::kSuccess;
    });
    EXPECT_EQ(result, Result::kRemoteError);
    self.leave();
  });
}

}  // namespace
}  // namespace baton::nccl
