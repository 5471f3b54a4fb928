// The UCX context, worker and endpoints, and the packets that go through them.
#include "transport/ucx/engine.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "transport/net/interfaces.h"

namespace baton::ucx {
namespace {
constexpr unsigned kMessageId = 0xBA;
constexpr std::chrono::milliseconds kFarewell{200};  // for what has been sent to leave, at the end

// Engines that wait for peers to go. Never destroyed: they may wait for longer than the program
// runs.
struct SetAside {
  std::mutex mutex;
  std::vector<std::unique_ptr<Engine>> engines;
  static SetAside& get() {
    static SetAside* const all = new SetAside;
    return *all;
  }
};

}  // namespace

Engine::Engine(const Library& library, Receiver receiver)
    : ucx_(library), receiver_(std::move(receiver)) {}

absl::StatusOr<std::unique_ptr<Engine>> Engine::create(const Options& options, Receiver receiver) {
  const auto library = Library::get();
  if (!library.ok()) return library.status();
  sweep();
  std::unique_ptr<Engine> engine(new Engine(**library, std::move(receiver)));
  Library::use();
  absl::Status status = engine->open(options);
  if (status.ok()) status = engine->start();
  if (!status.ok()) return status;
  return engine;
}

absl::Status Engine::check(const Options& options) {
  const auto library = Library::get();
  if (!library.ok()) return library.status();
  return Engine(**library, nullptr).open(options);
}

absl::Status Engine::descriptors_are_free(size_t wanted) {
  rlimit limit{};
  DIR* const open = opendir("/proc/self/fd");
  // Without /proc there is no telling.
  if (open == nullptr && errno != EMFILE && errno != ENFILE) return absl::OkStatus();
  size_t used = 0;
  while (open != nullptr && readdir(open) != nullptr) ++used;  // with ".", ".." and its own
  if (open != nullptr) closedir(open);
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return absl::OkStatus();
  }
  if (open != nullptr && used + wanted <= limit.rlim_cur + 3) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "UCX may need ", wanted, " file descriptors and aborts the process when they run out; ",
      open == nullptr ? "all" : absl::StrCat(used - 3), " of ", limit.rlim_cur,
      " are in use: raise `ulimit -n`"));
}

absl::Status Engine::open(const Options& options) {
  const size_t interfaces = net::own_addresses().size();
  if (absl::Status free = descriptors_are_free(kToStart + kForInterface * interfaces); !free.ok()) {
    return free;
  }
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx_.ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) {
    return absl::UnavailableError(
        absl::StrCat("UCX cannot read its configuration (", text(status),
                     "): look at the environment variables that begin with UCX_"));
  }
  // Every message is eager: a rendezvous would let UCX move bytes that we could not take back.
  ucx_.ucp_config_modify(config, "RNDV_THRESH", "inf");
  if (!options.tls.empty()) {
    status = ucx_.ucp_config_modify(config, "TLS", options.tls.c_str());
  }
  if (status == UCS_OK && !options.net_devices.empty()) {
    status = ucx_.ucp_config_modify(config, "NET_DEVICES", options.net_devices.c_str());
  }
  if (status == UCS_OK) {
    const ucp_params_t params{.field_mask = UCP_PARAM_FIELD_FEATURES,
                              .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    status = ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  }
  ucx_.ucp_config_release(config);
  if (status == UCS_OK) return absl::OkStatus();
  const auto named = [](const std::string& option, const char* variable) {
    const char* value = option.empty() ? std::getenv(variable) : option.c_str();
    return std::string(value != nullptr ? value : "of its choice");
  };
  return absl::UnavailableError(absl::StrCat(
      "UCX finds no transport here (", text(status), ") with transports ",
      named(options.tls, "UCX_TLS"), " and devices ", named(options.net_devices, "UCX_NET_DEVICES"),
      ": `ucx_info -d` (Debian: ucx-utils) lists its transports and devices; set ucx.tls and "
      "ucx.net_devices, or "
      "UCX_TLS and UCX_NET_DEVICES"));
}

absl::Status Engine::start() {
  const auto failed = [&](const char* what, ucs_status_t status) {
    return absl::UnavailableError(absl::StrCat(what, " failed: ", text(status)));
  };
  const ucp_worker_params_t params{.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                   .thread_mode = UCS_THREAD_MODE_SERIALIZED};
  ucs_status_t status = ucx_.ucp_worker_create(context_, &params, &worker_);
  if (status != UCS_OK) return failed("making a UCX worker", status);
  status = ucx_.ucp_worker_get_efd(worker_, &fd_);
  if (status != UCS_OK) return failed("waiting for UCX with a descriptor", status);
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  status = ucx_.ucp_worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) return failed("asking UCX for its address", status);
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  ucx_.ucp_worker_release_address(worker_, address);

  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.id = kMessageId;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = &Engine::on_message;
  handler.arg = this;
  status = ucx_.ucp_worker_set_am_recv_handler(worker_, &handler);
  return status == UCS_OK ? absl::OkStatus() : failed("receiving active messages", status);
}

Engine::~Engine() {
  if (worker_ != nullptr) ucx_.ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucx_.ucp_cleanup(context_);
}

void Engine::end(std::unique_ptr<Engine> engine) {
  if (engine == nullptr) return;
  if (!Library::usable().ok()) {  // a copy of the parent's, whose sockets are in use
    (void)engine.release();
    return;
  }
  sweep();
  engine->receiver_ = [](std::string_view) {};
  for (auto& endpoint : engine->endpoints_) endpoint->users = 0;
  engine->untidy_ = true;
  const auto until = std::chrono::steady_clock::now() + kFarewell;
  bool closed = engine->all_closed();
  while (!closed && std::chrono::steady_clock::now() < until) closed = engine->all_closed();
  if (closed) return;
  SetAside& aside = SetAside::get();
  const std::lock_guard lock(aside.mutex);
  aside.engines.push_back(std::move(engine));
}

// Whether every endpoint is closed, or another step towards it.
bool Engine::all_closed() {
  ucx_.ucp_worker_progress(worker_);
  collect();
  for (auto& endpoint : endpoints_) {
    if (endpoint->handle != nullptr && !endpoint->silent) close(*endpoint, 0);
  }
  return endpoints_.empty();
}

void Engine::sweep() {
  SetAside& aside = SetAside::get();
  const std::lock_guard lock(aside.mutex);
  std::erase_if(aside.engines, [](const auto& engine) {
    for (int i = 0; i < kBurst; ++i) {
      if (engine->all_closed()) return true;
    }
    return false;
  });
}

bool Engine::progress() {
  int rounds = 0;
  while (rounds < kBurst && ucx_.ucp_worker_progress(worker_) != 0) ++rounds;
  return collect() || rounds > 0;
}

bool Engine::holds_packets() const {
  return under_way_ > 0 &&
         std::any_of(endpoints_.begin(), endpoints_.end(), [](const auto& endpoint) {
           return endpoint->under_way > 0 && (endpoint->users > 0 || !endpoint->silent);
         });
}

absl::StatusOr<Endpoint*> Engine::connect(const std::string& address) {
  Endpoint* silent = nullptr;
  size_t silent_ones = 0;
  for (auto& known : endpoints_) {
    if (known->handle == nullptr || !known->failure.ok() || known->address != address) continue;
    if (known->silent) {
      if (silent_ones++ == 0) silent = known.get();
      continue;
    }
    ++known->users;
    return known.get();
  }
  if (silent_ones >= kMostSilent) {  // the oldest may have been heard by now
    ++silent->users;
    return silent;
  }
  if (absl::Status free = descriptors_are_free(kForEndpoint); !free.ok()) return free;
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->engine = this;
  endpoint->address = address;
  endpoint->users = 1;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &Engine::on_error;
  params.err_handler.arg = endpoint.get();
  const ucs_status_t status = ucx_.ucp_ep_create(worker_, &params, &endpoint->handle);
  if (status != UCS_OK) {
    return absl::UnavailableError(absl::StrCat(
        "UCX finds no route to the peer (", text(status),
        "): both sides need a transport in common (ucx.tls) and devices that reach each other "
        "(ucx.net_devices)"));
  }
  endpoints_.push_back(std::move(endpoint));
  return endpoints_.back().get();
}

void Engine::close(Endpoint& endpoint, uint32_t flags) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = flags;
  void* request = ucx_.ucp_ep_close_nbx(endpoint.handle, &param);
  endpoint.handle = nullptr;
  untidy_ = true;
  if (UCS_PTR_IS_PTR(request)) endpoint.closing = request;
}

// Closes endpoints that have failed, and forgets those that are closed and whose packets are back.
bool Engine::collect() {
  if (!untidy_) return false;
  bool again = false;
  const size_t gone = std::erase_if(endpoints_, [&](const auto& endpoint) {
    if (endpoint->users > 0) return false;
    if (endpoint->handle != nullptr && !endpoint->failure.ok()) {
      close(*endpoint, UCP_EP_CLOSE_FLAG_FORCE);
    }
    if (endpoint->handle != nullptr) return false;
    if (endpoint->closing != nullptr &&
        ucx_.ucp_request_check_status(endpoint->closing) != UCS_INPROGRESS) {
      ucx_.ucp_request_free(endpoint->closing);
      endpoint->closing = nullptr;
    }
    const bool closed = endpoint->closing == nullptr && endpoint->under_way == 0;
    again |= !closed;
    return closed;
  });
  untidy_ = again;
  return gone > 0;
}

void Engine::failed(Endpoint& endpoint, ucs_status_t status) {
  if (!endpoint.failure.ok()) return;
  endpoint.failure = absl::UnavailableError(text(status));
  failed_ = untidy_ = true;
}

Packet* Engine::acquire(size_t bytes) {
  const bool small = bytes <= kSmallPacket;
  std::vector<Packet*>& free = small ? free_small_ : free_large_;
  if (free.empty()) {
    auto packet = std::make_unique<Packet>();
    packet->capacity = small ? kSmallPacket : kMessageBytes;
    packet->data.reset(new char[packet->capacity]);
    packets_.push_back(std::move(packet));
    free.reserve(packets_.size());
    return packets_.back().get();
  }
  Packet* packet = free.back();
  free.pop_back();
  return packet;
}

void Engine::send(Endpoint& endpoint, Packet* packet, size_t bytes) {
  packet->endpoint = &endpoint;
  ++endpoint.under_way;
  ++under_way_;
  if (endpoint.handle == nullptr || !endpoint.failure.ok()) return done(packet, UCS_ERR_CANCELED);
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &Engine::on_sent;
  param.user_data = packet;
  void* request = ucx_.ucp_am_send_nbx(endpoint.handle, kMessageId, nullptr, 0, packet->data.get(),
                                       bytes, &param);
  if (!UCS_PTR_IS_PTR(request)) done(packet, UCS_PTR_STATUS(request));
}

void Engine::done(Packet* packet, ucs_status_t status) {
  Endpoint& endpoint = *packet->endpoint;
  --endpoint.under_way;
  --under_way_;
  ++endpoint.completed;
  if (status != UCS_OK) failed(endpoint, status);
  packet->endpoint = nullptr;
  give_back(packet);
}

void Engine::give_back(Packet* packet) {
  (packet->capacity == kSmallPacket ? free_small_ : free_large_).push_back(packet);
}

void Engine::on_sent(void* request, ucs_status_t status, void* user_data) {
  auto* packet = static_cast<Packet*>(user_data);
  Engine* self = packet->endpoint->engine;
  self->done(packet, status);
  self->ucx_.ucp_request_free(request);
}

void Engine::on_error(void* arg, ucp_ep_h, ucs_status_t status) {
  auto* endpoint = static_cast<Endpoint*>(arg);
  endpoint->engine->failed(*endpoint, status);
}

ucs_status_t Engine::on_message(void* self, const void*, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param) {
  // Baton's messages have no UCX header and arrive whole; any other message is dropped.
  if (header_bytes == 0 && !(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
    static_cast<Engine*>(self)->receiver_({static_cast<const char*>(data), bytes});
  }
  return UCS_OK;
}

}  // namespace baton::ucx
