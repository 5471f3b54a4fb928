// Chat templates: where they are found, and what they know.
#include "engine/tokenizer/chat_template.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/files/utf8.h"
#include "engine/tokenizer/special_tokens.h"
#include "render_templates.h"  // generated
#include "transport/base/limits/memory_left.h"
#include "transport/base/wire.h"

namespace baton::engine {
namespace {

constexpr size_t kLongestTemplate = size_t{16} << 20;

absl::StatusOr<std::string> template_of(const nlohmann::json& config) {
  const nlohmann::json& given = member(config, "chat_template");
  if (given.is_null()) return std::string();
  if (given.is_string()) return given.get<std::string>();
  if (given.is_array()) {
    for (const nlohmann::json& one : given) {
      const nlohmann::json& source = member(one, "template");
      if (member(one, "name") == "default" && source.is_string()) return source.get<std::string>();
    }
  }
  return absl::InvalidArgumentError(
      "tokenizer_config.json: \"chat_template\" is neither a string nor a list with one named "
      "\"default\"");
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Character c = decode_character(text, at);
    if (!c.valid) return false;
    at += c.bytes;
  }
  return true;
}

absl::Status behind(const std::string& words, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(words, ": ", status.message()));
}

}  // namespace

struct ChatTemplate::Impl {
  absl::Status status;
  std::shared_ptr<TemplateProcess> process;
  std::string source;
  nlohmann::ordered_json tokens;
};

absl::StatusOr<ChatTemplate> ChatTemplate::parse(const std::string& source,
                                                 const nlohmann::ordered_json& tokens) {
  if (!is_utf8(source)) return absl::InvalidArgumentError("the chat template is not UTF-8");
  std::shared_ptr<TemplateProcess> process = TemplateProcess::shared();
  const absl::Status status = process->compile(source);
  if (absl::IsInvalidArgument(status)) return behind("the chat template is wrong", status);
  if (!status.ok()) return status;
  return ChatTemplate(
      std::make_shared<const Impl>(Impl{status, std::move(process), source, tokens}));
}

ChatTemplate ChatTemplate::refused(absl::Status why) {
  return ChatTemplate(std::make_shared<const Impl>(Impl{std::move(why), nullptr, {}, {}}));
}

absl::Status ChatTemplate::status() const { return impl_->status; }

absl::StatusOr<std::string> ChatTemplate::render(const nlohmann::ordered_json& messages,
                                                 const ChatOptions& options) const {
  if (!impl_->status.ok()) return impl_->status;
  nlohmann::ordered_json values = impl_->tokens;
  nlohmann::ordered_json& kept = values["messages"] = nlohmann::ordered_json::array();
  for (const nlohmann::ordered_json& message : messages) {
    nlohmann::ordered_json one = nlohmann::ordered_json::object();
    for (const auto& [name, value] : message.items()) {
      if (!value.is_null()) one[name] = value;
    }
    kept.push_back(std::move(one));
  }
  values["tools"] = options.tools;
  values["documents"] = nullptr;
  values["add_generation_prompt"] = options.add_generation_prompt;
  absl::StatusOr<std::string> text = impl_->process->render(impl_->source, values);
  if (text.ok()) return text;
  return behind("the model's chat template cannot render this chat", text.status());
}

absl::StatusOr<std::optional<ChatTemplate>> load_chat_template(const std::string& directory) {
  const absl::StatusOr<nlohmann::json> config =
      read_json_beside(directory, "tokenizer_config.json");
  if (!config.ok()) return config.status();
  const absl::StatusOr<SpecialTokens> tokens = load_special_tokens(directory);
  if (!tokens.ok()) return tokens.status();
  absl::StatusOr<std::string> source =
      read_file(directory + "/chat_template.jinja", kLongestTemplate);
  if (absl::IsNotFound(source.status())) {
    source = template_of(*config);
  } else if (!source.ok()) {
    return source.status();
  }
  if (source.ok() && source->empty()) return std::nullopt;
  absl::StatusOr<ChatTemplate> made =
      source.ok() ? ChatTemplate::parse(*source, tokens->named) : source.status();
  if (made.ok()) return *std::move(made);
  const bool for_good =
      absl::IsInvalidArgument(made.status()) || absl::IsFailedPrecondition(made.status());
  if (!for_good) return behind(directory, made.status());
  return ChatTemplate::refused(behind(directory, made.status()));
}

// Starts Python, asks it, and replaces it when it dies.

namespace {

// The longest chat that the server takes needs some 100 MiB.
constexpr size_t kLeastMemory = size_t{128} << 20, kMostMemory = size_t{512} << 20;
constexpr size_t kLongestAnswer = size_t{64} << 20;
constexpr std::chrono::seconds kStart{60};
constexpr int kFailures = 2;  // in a row: then calls fail at once for a while
constexpr std::chrono::seconds kRest{10};
constexpr int kUnknown = -1;

// Address space of a process; 0: it is gone.
size_t size_of(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/statm"));
  size_t pages = 0;
  file >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Starts `python` with the socket as its standard input. Returns 0 or the error number.
int spawn(const std::string& python, const std::vector<std::string>& words, int socket,
          pid_t* pid) {
  std::vector<std::string> environment = {"LANG=C.UTF-8"};
  for (const char* name : {"PATH", "TZ"}) {
    if (const char* value = std::getenv(name)) {
      environment.push_back(absl::StrCat(name, "=", value));
    }
  }
  std::vector<char*> arguments, variables;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  for (const std::string& one : environment) variables.push_back(const_cast<char*>(one.c_str()));
  arguments.push_back(nullptr);
  variables.push_back(nullptr);

  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, socket, 0);
  posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  posix_spawn_file_actions_addclosefrom_np(&files, 3);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  sigfillset(&signals);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  // Not fork(): that copies the page tables of a process that may hold a model.
  const int error =
      posix_spawnp(pid, python.c_str(), &files, &attributes, arguments.data(), variables.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return error;
}

}  // namespace

std::shared_ptr<TemplateProcess> TemplateProcess::shared() {
  static std::mutex mutex;
  static auto* last = new std::weak_ptr<TemplateProcess>();
  const std::lock_guard lock(mutex);
  std::shared_ptr<TemplateProcess> process = last->lock();
  if (process == nullptr) *last = process = std::make_shared<TemplateProcess>();
  return process;
}

absl::Status TemplateProcess::compile(std::string_view source) {
  return call(source, nullptr).status();
}

absl::StatusOr<std::string> TemplateProcess::render(std::string_view source,
                                                    const nlohmann::ordered_json& variables) {
  return call(source, variables);
}

pid_t TemplateProcess::pid() {
  const std::lock_guard lock(mutex_);
  return pid_;
}

absl::StatusOr<std::string> TemplateProcess::call(std::string_view source,
                                                  const nlohmann::ordered_json& variables) {
  const std::string body = nlohmann::ordered_json::array({source, variables})
                               .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string request;
  base::put_number(request, static_cast<uint32_t>(body.size()));
  request += body;

  if (body.size() > kLongestAnswer) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the request is JSON of ", body.size(), " bytes, and ", kLongestAnswer, " are the most"));
  }

  const std::lock_guard lock(mutex_);
  using Steady = std::chrono::steady_clock;
  // Others wait for this lock meanwhile, and what fails may take a minute to do so.
  if (failures_ >= kFailures && Steady::now() < failed_at_ + kRest) return failure_;
  absl::StatusOr<std::string> text = ask(request);
  if (text.ok() || absl::IsInvalidArgument(text.status())) {
    failures_ = 0;
    return text;
  }
  ++failures_;
  failed_at_ = Steady::now();
  return failure_ = text.status();
}

absl::StatusOr<std::string> TemplateProcess::ask(std::string_view request) {
  absl::Status status;
  // A process that was killed since the last call costs its successor a start, and no request.
  for (int tries = 0; tries < 2; ++tries) {
    if (pid_ == 0) status = start();
    if (pid_ == 0 && absl::IsUnavailable(status)) continue;
    if (pid_ == 0) return status;
    deadline_ = std::chrono::steady_clock::now() + options_.patience;
    status = send(request);
    if (status.ok()) {
      absl::StatusOr<std::string> text = answer();
      if (text.ok() || absl::IsInvalidArgument(text.status())) return text;
      status = text.status();
    }
    const int how = end();
    if (how == kUnknown) break;  // it may have computed for too long, and would again
    if (WIFSIGNALED(how) && WTERMSIG(how) == SIGPROF) {
      return absl::InvalidArgumentError(
          absl::StrCat("it computes for more than ", options_.compute.count(), " s"));
    }
    if (absl::IsDeadlineExceeded(status)) break;
  }
  return status;
}

absl::Status TemplateProcess::start() {
  std::vector<std::string> tried;
  for (const std::string& python : options_.pythons) {
    const absl::Status status = start(python);
    if (status.ok()) {
      options_.pythons = {std::string(python)};
      return status;
    }
    const int how = end();
    if (how != kUnknown && WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL &&
        absl::IsUnavailable(status)) {
      return absl::UnavailableError(absl::StrCat(python, " was killed at its start"));
    }
    const bool passing = absl::IsResourceExhausted(status) || absl::IsDeadlineExceeded(status);
    if (passing) return absl::Status(status.code(), absl::StrCat(python, ": ", status.message()));
    tried.push_back(absl::StrCat(python, ": ", status.message()));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("chat templates need Python with Jinja2: install Debian's python3-jinja2, or "
                   "`pip install jinja2` for python3 in PATH (",
                   absl::StrJoin(tried, "; "), ")"));
}

absl::Status TemplateProcess::start(const std::string& python) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::ErrnoToStatus(errno, "socketpair");
  }
  socket_.reset(ends[0]);
  base::UniqueFd other(ends[1]);
  const size_t memory = std::clamp(base::memory_left().bytes / 16, kLeastMemory, kMostMemory);
  const int error = spawn(python,
                          {python, "-IB", "-Wignore", "-c", kRenderTemplates,
                           absl::StrCat(options_.compute.count()), absl::StrCat(memory)},
                          other.get(), &pid_);
  other.reset();  // so that the end of the process is the end of the connection
  if (error != 0) {
    pid_ = 0;
    if (error == EAGAIN) {
      return absl::ResourceExhaustedError("no process more: raise `ulimit -u` or the pids limit");
    }
    return absl::ErrnoToStatus(error, "cannot be started");
  }
  deadline_ = std::chrono::steady_clock::now() + patient(kStart);
  const absl::Status status = answer().status();
  rlimit most{};
  getrlimit(RLIMIT_AS, &most);
  if (absl::IsUnavailable(status) && most.rlim_cur != RLIM_INFINITY) {
    return absl::UnavailableError(absl::StrCat("it ends at its start; `ulimit -v` leaves it ",
                                               most.rlim_cur, " bytes: raise it"));
  }
  if (!status.ok()) return status;
  promised_ = static_cast<int64_t>(memory - std::min(memory, size_of(pid_)));
  base::promise_memory(promised_);
  return status;
}

absl::Status TemplateProcess::wait_for(short events) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline_ - std::chrono::steady_clock::now());
    pollfd poll_fd{.fd = socket_.get(), .events = events, .revents = 0};
    const int ready = left.count() <= 0 ? 0 : poll(&poll_fd, 1, static_cast<int>(left.count()));
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) {
      return absl::DeadlineExceededError("the process that renders chat templates does not answer");
    }
    if (errno != EINTR) return absl::UnavailableError(absl::StrCat("poll: ", strerror(errno)));
  }
}

absl::Status TemplateProcess::send(std::string_view bytes) {
  while (!bytes.empty()) {
    if (absl::Status status = wait_for(POLLOUT); !status.ok()) return status;
    const ssize_t sent =
        ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno != EINTR && errno != EAGAIN) {
      return absl::UnavailableError("the process that renders chat templates has ended");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TemplateProcess::receive(size_t size) {
  std::string bytes(size, '\0');
  for (size_t got = 0; got < size;) {
    if (absl::Status status = wait_for(POLLIN); !status.ok()) return status;
    const ssize_t more = recv(socket_.get(), bytes.data() + got, size - got, MSG_DONTWAIT);
    if (more > 0) {
      got += static_cast<size_t>(more);
    } else if (more == 0 || (errno != EINTR && errno != EAGAIN)) {
      return absl::UnavailableError("the process that renders chat templates has ended");
    }
  }
  return bytes;
}

absl::StatusOr<std::string> TemplateProcess::answer() {
  const absl::StatusOr<std::string> head = receive(sizeof(uint32_t));
  if (!head.ok()) return head.status();
  const size_t size = base::WireReader(*head).number<uint32_t>();
  if (size == 0 || size > kLongestAnswer) {
    end();  // the rest of it is not read
    return absl::InvalidArgumentError(absl::StrCat("it writes ", size - (size > 0), " bytes, and ",
                                                   kLongestAnswer, " are the most"));
  }
  absl::StatusOr<std::string> answer = receive(size);
  if (!answer.ok()) return answer;
  const bool text = answer->front() == 't';
  answer->erase(0, 1);
  if (text) return answer;
  return absl::InvalidArgumentError(*answer);
}

// Kills the process and gives its wait status; kUnknown where SIGCHLD is ignored.
int TemplateProcess::end() {
  int how = 0;
  socket_.reset();
  base::promise_memory(-std::exchange(promised_, 0));
  if (pid_ == 0) return how;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, &how, 0) < 0) {
    if (errno != EINTR) {
      how = kUnknown;
      break;
    }
  }
  pid_ = 0;
  return how;
}

}  // namespace baton::engine
