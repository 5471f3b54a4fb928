// An agent with memory, in this process or in one beside it, for tests from the header alone.
#pragma once

#include <baton/baton.h>

#include "tests/test.h"

namespace baton::capi_tests {

inline constexpr int64_t kLong = 60'000'000'000;
inline constexpr size_t kBytes = 1 << 20;

// An agent with memory. `provider`: "" for any.
class Side {
 public:
  explicit Side(const char* name, const char* provider = "", const char* key_file = nullptr) {
    baton_agent_options options;
    baton_agent_options_init(&options, sizeof options);
    options.name = name;
    options.require = provider;
    options.key_file = key_file;
    good_ = baton_agent_create(&options, &agent, &error) == BATON_OK &&
            baton_agent_register(agent, BATON_DRAM, &whole, 1, &error) == BATON_OK;
  }
  ~Side() {
    baton_agent_destroy(agent);
    munmap(memory_, kBytes);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  bool good() const { return good_; }
  char* memory() { return memory_; }
  baton_descriptor part(size_t bytes) const { return {whole.address, bytes, 0}; }
  std::string metadata() {
    baton_bytes bytes{};
    if (baton_agent_metadata(agent, &bytes, &error) != BATON_OK) return "";
    std::string out(bytes.data, bytes.size);
    baton_bytes_free(&bytes);
    return out;
  }
  bool meet(const std::string& metadata) {
    return baton_agent_add_remote(agent, metadata.data(), metadata.size(), nullptr, &error) ==
           BATON_OK;
  }
  baton_transfer make(int32_t op, const char* other, uint64_t there, size_t bytes = kBytes) {
    const baton_descriptor local = part(bytes), remote{there, bytes, 0};
    baton_transfer out = 0;
    baton_transfer_make_direct(agent, op, BATON_DRAM, &local, 1, &remote, 1, other, nullptr, 0,
                               &out, &error);
    return out;
  }
  baton_agent* agent = nullptr;
  baton_error error = BATON_ERROR_INIT;

 private:
  char* const memory_ = static_cast<char*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  bool good_ = false;

 public:
  const baton_descriptor whole{reinterpret_cast<uint64_t>(memory_), kBytes, 0};
};

// NULL, and a test that has failed, where there is none.
inline baton_kv_connector* open_connector(const char* name, uint32_t allow_pull = 0) {
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  options.name = name;
  options.allow_pull = allow_pull;
  baton_kv_connector* out = nullptr;
  baton_error error = BATON_ERROR_INIT;
  EXPECT_EQ(baton_kv_connector_create(&options, &out, &error), BATON_OK) << error.text;
  return out;
}

// A cache of a test, which its connector knows: [K or V][block][head][token] of each layer.
struct Cache {
  Cache(baton_kv_connector* connector, uint32_t layers, uint32_t blocks, uint32_t block_tokens,
        uint32_t heads)
      : memory(layers, std::vector<char>(size_t{2} * blocks * block_tokens * heads * 8)) {
    const baton_kv_model model{sizeof model, "weights", nullptr, nullptr, nullptr};
    const baton_kv_group group{sizeof group, nullptr, layers, blocks, block_tokens, 0,
                               heads,        0,       heads};
    const baton_kv_paged paged{sizeof paged, 8, BATON_KV_BYTE, BATON_KV_HND, BATON_KV_STACKED, 0};
    std::vector<baton_descriptor> tensors;
    for (auto& layer : memory) {
      tensors.push_back({reinterpret_cast<uint64_t>(layer.data()), layer.size(), 0});
    }
    baton_error error = BATON_ERROR_INIT;
    EXPECT_EQ(baton_kv_layout_create(&model, &layout, &error), BATON_OK) << error.text;
    EXPECT_EQ(baton_kv_layout_add_paged(layout, BATON_DRAM, tensors.data(), tensors.size(), &group,
                                        &paged, &error),
              BATON_OK)
        << error.text;
    EXPECT_EQ(baton_kv_connector_register_cache(connector, layout, &error), BATON_OK) << error.text;
  }
  ~Cache() { baton_kv_layout_destroy(layout); }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  std::vector<std::vector<char>> memory;  // outlives the connector, as its owner has it
  baton_kv_layout* layout = nullptr;
};

// Two agents of this process meet and move something. For children, which cannot fail a test.
inline bool two_agents_work(const char* key_file = nullptr) {
  Side a("a", "", key_file), b("b", "", key_file);
  if (!a.good() || !b.good() || !a.meet(b.metadata())) return false;
  a.memory()[7] = 'x';
  const baton_transfer write =
      a.make(BATON_WRITE, "b", reinterpret_cast<uint64_t>(b.memory()), 4096);
  if (baton_transfer_run(a.agent, write, kLong, &a.error) != BATON_OK) return false;
  return b.memory()[7] == 'x';
}

// A child that runs `body(in, out)` and ends with what it returns; SIGALRM ends one that hangs.
class Child {
 public:
  explicit Child(const std::function<int(int, int)>& body) {
    int up[2], down[2];
    EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(up[0]);
      close(down[1]);
      signal(SIGALRM, SIG_DFL);
      alarm(60);
      _exit(body(down[0], up[1]));
    }
    close(up[1]);
    close(down[0]);
    out_ = down[1];
    in_ = up[0];
  }
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(in_);
    close(out_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  int ends() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return status;
  }
  // What it said with say(), in whole.
  std::string hear() {
    uint32_t size = 0;
    if (read(in_, &size, sizeof size) != sizeof size) return "";
    std::string text(size, 0);
    for (size_t at = 0; at < size;) {
      const ssize_t got = read(in_, text.data() + at, size - at);
      if (got <= 0) return "";
      at += static_cast<size_t>(got);
    }
    return text;
  }
  void let_end() { close(std::exchange(out_, -1)); }

 private:
  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
};
inline void say(int fd, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  if (write(fd, &size, sizeof size) < 0 || write(fd, text.data(), size) < 0) _exit(99);
}
inline void wait_for_end(int fd) {
  char byte = 0;
  while (read(fd, &byte, 1) > 0) {
  }
}
inline uint64_t number(const std::string& text) {
  uint64_t out = 0;
  if (text.size() == sizeof out) memcpy(&out, text.data(), sizeof out);
  return out;
}

}  // namespace baton::capi_tests
