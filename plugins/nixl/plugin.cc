// libplugin_BATON.so: a backend with which NIXL's own agent moves its bytes over Baton. NIXL keeps
// its metadata, lists and handles; each of its agents has one of Baton's, of the same name, behind
// baton/baton.h.
//
// Threads: as NIXL's agent calls it, and any other way; Baton's agent takes calls from everywhere.
#include <baton/baton.h>

#include <string>
#include <vector>

#include "backend/backend_plugin.h"

// Both number their results alike: NIXL's is what Baton's says.
static_assert(static_cast<int>(BATON_ERR_NOT_FOUND) == static_cast<int>(NIXL_ERR_NOT_FOUND));
static_assert(static_cast<int>(BATON_ERR_REMOTE_DISCONNECT) ==
              static_cast<int>(NIXL_ERR_REMOTE_DISCONNECT));

namespace {

constexpr int64_t kFenceTime =
    5'000'000'000;  // ns: what a release waits for a silent peer; then it goes on by itself

static_assert(static_cast<int>(BATON_DRAM) == static_cast<int>(DRAM_SEG));
static_assert(static_cast<int>(BATON_VRAM) == static_cast<int>(VRAM_SEG));

// Offers device memory only if this process may use a device. Asking loads CUDA's driver.
nixl_mem_list_t supported() {
  nixl_mem_list_t out = {DRAM_SEG};
  if (baton_memory_supported(BATON_VRAM, nullptr) == BATON_OK) out.push_back(VRAM_SEG);
  return out;
}
bool is_memory(nixl_mem_t kind) { return kind == DRAM_SEG || kind == VRAM_SEG; }

// A registered range, here or at a peer.
struct Range : nixlBackendMD {
  Range(const nixlBasicDesc& at, nixl_mem_t of)
      : nixlBackendMD(true), where{at.addr, at.len, at.devId}, kind(of) {}
  baton_descriptor where;
  int32_t kind;
};

struct Request : nixlBackendReqH {
  baton_transfer transfer = 0;
  std::string agent;
  bool empty_message = false;  // owed: Baton's transfers carry messages of at least a byte
};

std::vector<baton_descriptor> descriptors(const nixl_meta_dlist_t& list) {
  std::vector<baton_descriptor> out;
  out.reserve(list.descCount());
  for (const nixlMetaDesc& one : list) out.push_back({one.addr, one.len, one.devId});
  return out;
}

class Engine : public nixlBackendEngine {
 public:
  explicit Engine(const nixlBackendInitParams* init) : nixlBackendEngine(init) {
    baton_agent_options options;
    baton_agent_options_init(&options, sizeof(options));
    std::string host = "*", advertise,
                settings;  // as NIXL's UCX does: peers may be on other machines
    static_cast<void>(getInitParam("listen_host", host));  // what is not given stays as it is
    static_cast<void>(getInitParam("advertise", advertise));
    static_cast<void>(getInitParam("settings", settings));
    options.name = localAgent.c_str();
    options.listen_host = host.c_str();
    options.advertise = advertise.c_str();
    options.settings = settings.empty() ? nullptr : settings.c_str();
    options.progress_thread = 1;
    baton_error error = BATON_ERROR_INIT;
    if (baton_agent_create(&options, &agent_, &error) != BATON_OK) {
      NIXL_ERROR << "Baton's agent was not made: " << error.text << '\n';
      initErr = true;
    }
  }
  ~Engine() override { baton_agent_destroy(agent_); }

  bool supportsRemote() const override { return true; }
  bool supportsLocal() const override { return true; }
  bool supportsNotif() const override { return true; }
  nixl_mem_list_t getSupportedMems() const override { return supported(); }

  // --- memory

  nixl_status_t registerMem(const nixlBlobDesc& memory, const nixl_mem_t& kind,
                            nixlBackendMD*& out) override {
    if (!is_memory(kind)) return NIXL_ERR_NOT_SUPPORTED;
    auto* range = new Range(memory, kind);
    const nixl_status_t status =
        said(baton_agent_register(agent_, kind, &range->where, 1, error()));
    if (status != NIXL_SUCCESS) {
      delete range;
      return status;
    }
    out = range;
    return status;
  }
  nixl_status_t deregisterMem(nixlBackendMD* range) override {
    const Range was = *static_cast<Range*>(range);
    delete range;
    return said(baton_agent_deregister(agent_, was.kind, &was.where, 1, error()));
  }
  nixl_status_t loadLocalMD(nixlBackendMD* range, nixlBackendMD*& out) override {
    out = new Range(*static_cast<Range*>(range));
    return NIXL_SUCCESS;
  }
  nixl_status_t unloadMD(nixlBackendMD* range) override {
    delete range;
    return NIXL_SUCCESS;
  }

  // --- agents that know each other

  nixl_status_t getPublicData(const nixlBackendMD* range, std::string& out) const override {
    const auto* ours = static_cast<const Range*>(range);
    return partial(ours->kind, &ours->where, 1, false, out);
  }
  nixl_status_t getConnInfo(std::string& out) const override {
    return partial(BATON_DRAM, nullptr, 0, true, out);
  }
  nixl_status_t loadRemoteConnInfo(const std::string& remote, const std::string& info) override {
    return remote == localAgent ? NIXL_SUCCESS : add(info);
  }
  nixl_status_t loadRemoteMD(const nixlBlobDesc& memory, const nixl_mem_t& kind, const std::string&,
                             nixlBackendMD*& out) override {
    if (!is_memory(kind)) return NIXL_ERR_NOT_SUPPORTED;
    const nixl_status_t status = add(memory.metaInfo);
    if (status == NIXL_SUCCESS) out = new Range(memory, kind);
    return status;
  }
  nixl_status_t connect(const std::string& remote) override {
    return remote == localAgent ? NIXL_SUCCESS
                                : said(baton_agent_connect(agent_, remote.c_str(), error()));
  }
  nixl_status_t disconnect(const std::string& remote) override {
    return remote == localAgent ? NIXL_SUCCESS
                                : said(baton_agent_remove_remote(agent_, remote.c_str(), error()));
  }

  // --- transfers

  nixl_status_t prepXfer(const nixl_xfer_op_t& op, const nixl_meta_dlist_t& local,
                         const nixl_meta_dlist_t& remote, const std::string& name,
                         nixlBackendReqH*& out, const nixl_opt_b_args_t*) const override {
    const std::vector<baton_descriptor> mine = descriptors(local), theirs = descriptors(remote);
    auto* request = new Request;
    request->agent = name;
    const nixl_status_t status = said(baton_transfer_make_between(
        agent_, op == NIXL_READ ? BATON_READ : BATON_WRITE, local.getType(), mine.data(),
        mine.size(), remote.getType(), theirs.data(), theirs.size(), name.c_str(), nullptr, 0,
        &request->transfer, error()));
    if (status != NIXL_SUCCESS) {
      delete request;
      return status;
    }
    out = request;
    return status;
  }
  nixl_status_t postXfer(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&,
                         const std::string&, nixlBackendReqH*& handle,
                         const nixl_opt_b_args_t* more) const override {
    auto* request = static_cast<Request*>(handle);
    const std::string message = more != nullptr && more->hasNotif ? more->notifMsg : "";
    const nixl_status_t status = said(
        baton_transfer_post(agent_, request->transfer, message.data(), message.size(), error()));
    request->empty_message = status >= 0 && more != nullptr && more->hasNotif && message.empty();
    return status < 0 ? status : checkXfer(handle);
  }
  nixl_status_t checkXfer(nixlBackendReqH* handle) const override {
    auto* request = static_cast<Request*>(handle);
    const nixl_status_t status = said(baton_transfer_state(agent_, request->transfer, error()));
    if (status == NIXL_SUCCESS && request->empty_message) {
      request->empty_message = false;
      return genNotif(request->agent, "");
    }
    return status;
  }
  // Fenced: no byte moves any more when it returns.
  nixl_status_t releaseReqH(nixlBackendReqH* handle) const override {
    auto* request = static_cast<Request*>(handle);
    if (baton_transfer_release(agent_, request->transfer, kFenceTime, error()) != BATON_OK) {
      baton_transfer_abandon(agent_, request->transfer);
    }
    delete request;
    return NIXL_SUCCESS;
  }

  // --- messages

  nixl_status_t getNotifs(notif_list_t& out) override {
    baton_bytes from{}, message{};
    while (baton_next_message(agent_, &from, &message, error()) == BATON_OK) {
      out.emplace_back(std::string(from.data, from.size), std::string(message.data, message.size));
      baton_bytes_free(&from);
      baton_bytes_free(&message);
    }
    return NIXL_SUCCESS;
  }
  nixl_status_t genNotif(const std::string& remote, const std::string& message) const override {
    return said(baton_notify(agent_, remote.c_str(), message.data(), message.size(), error()));
  }

 private:
  // The error of this thread's last call.
  static baton_error* error() {
    thread_local baton_error last = BATON_ERROR_INIT;
    return &last;
  }
  // NIXL has no place for a text, so it goes where its own errors go.
  static nixl_status_t said(int32_t result) {
    if (result < 0) NIXL_ERROR << "Baton: " << error()->text << '\n';
    return result == BATON_ERR_TIMEOUT ? NIXL_ERR_BACKEND : static_cast<nixl_status_t>(result);
  }
  nixl_status_t partial(int32_t kind, const baton_descriptor* ranges, size_t count,
                        bool with_address, std::string& out) const {
    baton_bytes bytes{};
    const int32_t result =
        baton_agent_partial_metadata(agent_, kind, ranges, count, with_address, &bytes, error());
    if (result == BATON_OK) out.assign(bytes.data, bytes.size);
    baton_bytes_free(&bytes);
    return said(result);
  }
  nixl_status_t add(const std::string& metadata) const {
    return said(baton_agent_add_remote(agent_, metadata.data(), metadata.size(), nullptr, error()));
  }

  baton_agent* agent_ = nullptr;
};

}  // namespace

nixlBackendPlugin* nixl_plugin_init() {
  nixlBackendPlugin* const plugin = nixlBackendPluginCreator<Engine>::create(
      NIXL_PLUGIN_API_VERSION, "BATON", baton_version(),
      {{"listen_host", "*"}, {"advertise", ""}, {"settings", ""}}, {DRAM_SEG});
  plugin->get_backend_mems = supported;  // when it is asked, and not whenever plugins are looked at
  return plugin;
}

void nixl_plugin_fini() {}
