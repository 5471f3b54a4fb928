// Structs whose end is the end of the readable memory, of every size from 0 to what this header
// says and beyond it: no call touches a byte behind `size`, and none believes a size that no
// struct has.
#include <baton/baton.h>

#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;

// The last bytes before a page that nobody may touch.
class Edge {
 public:
  Edge() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<char*>(
        mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(memory_, MAP_FAILED);
    EXPECT_EQ(mprotect(memory_ + page_, page_, PROT_NONE), 0);
  }
  ~Edge() { munmap(memory_, 2 * page_); }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;
  // `size` bytes of `from` there, aligned as a T is, but at least the eight that say the size.
  template <typename T>
  T* put(const T& from, size_t size) {
    const size_t there = std::max(size, sizeof(size_t));
    char* at = memory_ + page_ - (there + alignof(T) - 1) / alignof(T) * alignof(T);
    std::memcpy(at, &from, there);
    std::memcpy(at, &size, sizeof size);
    return reinterpret_cast<T*>(at);
  }

 private:
  size_t page_;
  char* memory_;
};

constexpr uint32_t kLayers = 2, kBlocks = 8, kBlockTokens = 4, kHeads = 2, kHeadSize = 8;

struct Structs : ::testing::Test {
  Structs() {
    cache.resize(size_t{2} * kBlocks * kBlockTokens * kHeads * kHeadSize * kLayers);
    const uint64_t layer = cache.size() / kLayers;
    for (uint32_t i = 0; i < kLayers; ++i) {
      tensors.push_back({reinterpret_cast<uint64_t>(cache.data()) + i * layer, layer, 0});
    }
    EXPECT_EQ(baton_agent_open("structs", &agent, &error), BATON_OK) << error.text;
    EXPECT_EQ(baton_agent_register(agent, BATON_DRAM, tensors.data(), tensors.size(), &error),
              BATON_OK)
        << error.text;
    baton_bytes metadata{};
    EXPECT_EQ(baton_agent_open("other", &other, &error), BATON_OK) << error.text;
    EXPECT_EQ(baton_agent_register(other, BATON_DRAM, tensors.data(), tensors.size(), &error),
              BATON_OK);
    EXPECT_EQ(baton_agent_metadata(other, &metadata, &error), BATON_OK);
    EXPECT_EQ(baton_agent_add_remote(agent, metadata.data, metadata.size, nullptr, &error),
              BATON_OK);
    baton_bytes_free(&metadata);
    EXPECT_EQ(baton_kv_layout_create(&model, &layout, &error), BATON_OK) << error.text;
    EXPECT_EQ(add(layout, &group, &paged), BATON_OK) << error.text;
  }
  ~Structs() override {
    baton_kv_layout_destroy(layout);
    baton_agent_destroy(agent);
    baton_agent_destroy(other);
  }
  int32_t add(baton_kv_layout* to, const baton_kv_group* with, const baton_kv_paged* how) {
    return baton_kv_layout_add_paged(to, BATON_DRAM, tensors.data(), tensors.size(), with, how,
                                     &error);
  }
  // What a call makes is there where it says so.
  template <typename Handle, typename Create>
  static int32_t makes(const Create& create, void (*destroy)(Handle*)) {
    Handle* made = nullptr;
    const int32_t result = create(&made);
    EXPECT_EQ(made != nullptr, result == BATON_OK);
    destroy(made);
    return result;
  }
  // `call` with each size: every byte that it reads or writes is within it. A size that no struct
  // can have is refused where it would cut a pointer; that of this header and any later one is
  // taken.
  template <typename T>
  void every_size(const T& value, const std::function<int32_t(T*)>& call) {
    for (size_t size = 0; size <= sizeof(T); ++size) {
      const int32_t result = call(edge.put(value, size));
      EXPECT_TRUE(result == BATON_OK || result == BATON_ERR_INVALID_PARAM)
          << size << ": " << baton_result_name(result) << ", " << error.text;
      if (size < sizeof(size_t)) {
        EXPECT_EQ(result, BATON_ERR_INVALID_PARAM) << size;
      }
      if (size == sizeof(T)) {
        EXPECT_EQ(result, BATON_OK) << error.text;
      }
    }
    for (const size_t size : {sizeof(T) + 8, size_t{4096}, SIZE_MAX - 7}) {
      T* later = edge.put(value, sizeof(T));
      std::memcpy(later, &size, sizeof size);
      const int32_t result = call(later);
      EXPECT_EQ(result, BATON_OK) << size << ": " << error.text;
    }
  }
  Edge edge;
  std::vector<char> cache;
  std::vector<baton_descriptor> tensors;
  baton_kv_model model{sizeof model, "weights", "bf16", "rope", "format"};
  baton_kv_group group{sizeof group, nullptr, kLayers, kBlocks, kBlockTokens, 0, kHeads, 0, kHeads};
  baton_kv_paged paged{sizeof paged, kHeadSize, BATON_KV_BYTE, BATON_KV_NHD, BATON_KV_STACKED, 0};
  baton_agent* agent = nullptr;
  baton_agent* other = nullptr;
  baton_kv_layout* layout = nullptr;
  baton_error error = BATON_ERROR_INIT;
};

TEST_F(Structs, Agents) {
  baton_agent_options options;
  baton_agent_options_init(&options, sizeof options);
  options.name = "sized";
  every_size<baton_agent_options>(options, [&](baton_agent_options* sized) {
    return makes([&](auto** made) { return baton_agent_create(sized, made, &error); },
                 baton_agent_destroy);
  });
  every_size<baton_agent_stats>(
      {}, [&](baton_agent_stats* sized) { return baton_agent_get_stats(agent, sized, &error); });
  const baton_descriptor from{tensors[0].address, 8, 0}, to{tensors[1].address, 8, 0};
  baton_transfer transfer = 0;
  ASSERT_EQ(baton_transfer_make_direct(agent, BATON_WRITE, BATON_DRAM, &from, 1, &to, 1, "other",
                                       nullptr, 0, &transfer, &error),
            BATON_OK)
      << error.text;
  ASSERT_EQ(baton_transfer_post(agent, transfer, nullptr, 0, &error), BATON_OK);
  ASSERT_EQ(baton_transfer_wait(agent, transfer, BATON_FOREVER, &error), BATON_OK);
  every_size<baton_telemetry>({}, [&](baton_telemetry* sized) {
    return baton_transfer_telemetry(agent, transfer, sized, &error);
  });
}

TEST_F(Structs, OptionsAreFilledAsFarAsTheyGo) {
  for (size_t size = 0; size <= sizeof(baton_agent_options); ++size) {
    baton_agent_options_init(edge.put(baton_agent_options{}, size), size);
  }
  for (size_t size = 0; size <= sizeof(baton_kv_connector_options); ++size) {
    baton_kv_connector_options_init(edge.put(baton_kv_connector_options{}, size), size);
  }
}

// Of an error the caller may never hear that its own size is wrong; it is left alone.
TEST_F(Structs, Errors) {
  for (size_t size = 0; size <= sizeof(baton_error); ++size) {
    EXPECT_EQ(baton_list_release(agent, 1, edge.put(baton_error{}, size)), BATON_ERR_NOT_FOUND);
  }
  for (const size_t size : {sizeof(baton_error) + 1, size_t{1} << 40, SIZE_MAX}) {
    baton_error* later = edge.put(baton_error{}, sizeof(baton_error));
    later->size = size;
    EXPECT_EQ(baton_list_release(agent, 1, later), BATON_ERR_NOT_FOUND);
    const std::string name(3000, 'n');
    EXPECT_EQ(baton_notify(agent, name.c_str(), "", 0, later), BATON_ERR_NOT_FOUND);
    EXPECT_LT(strnlen(later->text, sizeof later->text), sizeof later->text);
  }
}

TEST_F(Structs, LayoutsAndPlans) {
  every_size<baton_kv_model>(model, [&](baton_kv_model* sized) {
    return makes([&](auto** made) { return baton_kv_layout_create(sized, made, &error); },
                 baton_kv_layout_destroy);
  });
  const auto added = [&](const baton_kv_group* with, const baton_kv_paged* how) {
    baton_kv_layout* made = nullptr;
    EXPECT_EQ(baton_kv_layout_create(&model, &made, &error), BATON_OK);
    const int32_t result = add(made, with, how);
    baton_kv_layout_destroy(made);
    return result;
  };
  every_size<baton_kv_group>(group, [&](baton_kv_group* sized) { return added(sized, &paged); });
  every_size<baton_kv_paged>(paged, [&](baton_kv_paged* sized) { return added(&group, sized); });
  every_size<baton_kv_group>({}, [&](baton_kv_group* sized) {
    return baton_kv_layout_get_group(layout, 0, sized, &error);
  });

  every_size<baton_kv_share>({sizeof(baton_kv_share), 1, 0, 0}, [&](baton_kv_share* sized) {
    const auto create = [&](auto** made) {
      return baton_kv_plan_create(agent, BATON_WRITE, layout, "other", layout, sized, made, &error);
    };
    return makes(create, baton_kv_plan_destroy);
  });
  baton_kv_plan* plan = nullptr;
  ASSERT_EQ(
      baton_kv_plan_create(agent, BATON_WRITE, layout, "other", layout, nullptr, &plan, &error),
      BATON_OK)
      << error.text;
  every_size<baton_kv_plan_info>(
      {}, [&](baton_kv_plan_info* sized) { return baton_kv_plan_get_info(plan, sized, &error); });
  const int64_t numbers[] = {1, 2};
  const baton_kv_blocks blocks{numbers, 2, 0};
  baton_kv_request request = BATON_KV_REQUEST_INIT;
  request.local = request.remote = &blocks;
  request.local_groups = request.remote_groups = 1;
  every_size<baton_kv_request>(request, [&](baton_kv_request* sized) {
    baton_transfer made = 0;
    const int32_t result =
        baton_kv_plan_make_transfer(agent, plan, sized, nullptr, 0, &made, &error);
    EXPECT_EQ(made != 0, result == BATON_OK);
    baton_transfer_abandon(agent, made);
    return result;
  });
  baton_kv_plan_destroy(plan);
}

TEST_F(Structs, Connectors) {
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  options.name = "sized";
  every_size<baton_kv_connector_options>(options, [&](baton_kv_connector_options* sized) {
    return makes([&](auto** made) { return baton_kv_connector_create(sized, made, &error); },
                 baton_kv_connector_destroy);
  });
  baton_kv_connector* connector = nullptr;
  ASSERT_EQ(baton_kv_connector_create(&options, &connector, &error), BATON_OK) << error.text;
  ASSERT_EQ(baton_kv_connector_register_cache(connector, layout, &error), BATON_OK) << error.text;
  every_size<baton_kv_connector_stats>({}, [&](baton_kv_connector_stats* sized) {
    return baton_kv_connector_get_stats(connector, sized, nullptr, &error);
  });
  uint64_t next = 0;
  every_size<baton_kv_binding>({sizeof(baton_kv_binding), "", 8, 1, 0},
                               [&](baton_kv_binding* sized) {
                                 const std::string key = "request " + std::to_string(++next);
                                 if (sized->size >= 16) sized->key = key.c_str();
                                 uint64_t job = 0;
                                 return baton_kv_job_bind(connector, sized, &job, &error);
                               });
  // To itself, so that there are jobs.
  baton_bytes address{};
  ASSERT_EQ(baton_kv_connector_address(connector, &address, &error), BATON_OK);
  const int32_t tokens[8] = {};
  const uint32_t blocks[2] = {1, 2};
  baton_kv_load load = BATON_KV_LOAD_INIT;
  load.prefill = address.data;
  load.tokens = tokens;
  load.token_count = 8;
  load.blocks = blocks;
  load.block_count = 2;
  uint64_t id = 0;
  every_size<baton_kv_load>(load, [&](baton_kv_load* sized) {
    if (sized->size >= 16) sized->id = ++id;
    const int32_t result = baton_kv_load_start(connector, sized, &error);
    EXPECT_EQ(baton_kv_load_state(connector, id, nullptr, nullptr) != BATON_ERR_NOT_FOUND,
              result == BATON_OK)
        << id;
    baton_error ended = BATON_ERROR_INIT;  // `error` says why it did not start
    until([&] { return baton_kv_load_end(connector, id, &ended) != BATON_IN_PROGRESS; },
          [&] { baton_kv_connector_wait(connector, 10'000'000, &ended); });
    return result;
  });
  every_size<baton_kv_job>({}, [&](baton_kv_job* sized) {
    int32_t result = BATON_ERR_NOT_FOUND;
    if (sized->size >= 64) {  // there is one more than sizes that are taken
      baton_kv_connector_wait(connector, 10'000'000, &error);
    }
    result = baton_kv_job_next(connector, sized, &error);
    return result == BATON_ERR_NOT_FOUND ? BATON_OK : result;
  });
  baton_bytes_free(&address);
  baton_kv_connector_destroy(connector);
}

TEST_F(Structs, Sessions) {
  const std::string own_cache =
      R"({"identity": "sized", "rows": [[)" + std::to_string(tensors[0].address) +
      R"(, 64, 0, 64, 8]], "layers": [0],)"
      R"("kinds": [{"block_tokens": 4, "bytes": 64, "whole": "a test's"}]})";
  baton_agent* named = nullptr;
  ASSERT_EQ(baton_agent_open("sized/0", &named, &error), BATON_OK) << error.text;
  ASSERT_EQ(baton_agent_register(named, BATON_DRAM, tensors.data(), 1, &error), BATON_OK);
  baton_kv_session* session = nullptr;
  ASSERT_EQ(baton_kv_session_create(named, own_cache.c_str(), nullptr, nullptr, &session, &error),
            BATON_OK)
      << error.text;
  const uint32_t block = 1;
  const baton_kv_run run{0, &block, 1, 0, 4};
  baton_kv_session_order order = BATON_KV_SESSION_ORDER_INIT;
  order.transfer = order.agent = "t";
  order.address = "127.0.0.1:1";
  order.runs = &run;
  order.run_count = 1;
  uint64_t id = 0, orders = 0, ended = 0;
  every_size<baton_kv_session_order>(order, [&](baton_kv_session_order* sized) {
    if (sized->size >= 16) sized->id = ++id;
    const int32_t result = baton_kv_session_load(session, sized, &error);
    orders += result == BATON_OK && sized->size >= 56 ? 1 : 0;  // of less nothing is wanted
    return result;
  });
  baton_kv_loaded loaded{sizeof loaded, 0, 0, 0};
  while (ended < orders) {  // nobody is there, or two load one transfer
    EXPECT_LT(baton_kv_session_next_loaded(session, BATON_FOREVER, &loaded, &error), 0);
    ended += loaded.id != 0 ? 1 : 0;
  }
  every_size<baton_kv_loaded>({}, [&](baton_kv_loaded* sized) {
    const int32_t result = baton_kv_session_next_loaded(session, 0, sized, &error);
    return result == BATON_IN_PROGRESS ? BATON_OK : result;
  });
  uint64_t send = 0;
  EXPECT_EQ(baton_kv_session_open(session, "u", &send, &error), BATON_OK);
  EXPECT_EQ(baton_kv_session_save(session, send, 1, 0, &block, 1, &error), BATON_ERR_INVALID_PARAM);
  const uint32_t beyond = 8;
  EXPECT_EQ(baton_kv_session_save(session, send, 0, 0, &beyond, 1, &error),
            BATON_ERR_INVALID_PARAM);
  baton_kv_session_destroy(session);
  baton_agent_destroy(named);
}

}  // namespace
