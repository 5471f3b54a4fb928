// A checkpoint's own way of writing a chat as a prompt: a Jinja template (template_process.h).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/clock.h"

namespace baton::engine {

// The inputs of a chat template besides the messages.
struct ChatOptions {
  bool add_generation_prompt = true;  // ends where the answer begins
  nlohmann::ordered_json tools;       // a list of JSON schemas; null: none
};

// Immutable; any number of threads may render at once. Copies share the template.
class ChatTemplate {
 public:
  // `tokens` is what the template knows by the names of special tokens: {"bos_token": "<s>"}.
  // InvalidArgument with the line of what is no Jinja; FailedPrecondition without Jinja2.
  static absl::StatusOr<ChatTemplate> parse(
      const std::string& source,
      const nlohmann::ordered_json& tokens = nlohmann::ordered_json::object());
  // A template that cannot render: render() returns this error.
  static ChatTemplate refused(absl::Status why);

  // `messages` is a list of objects with role and content. What transformers' apply_chat_template
  // writes, where null members are left out. InvalidArgument with the template's words where it
  // refuses the chat (raise_exception), or with what is wrong; other errors are of the process.
  absl::StatusOr<std::string> render(const nlohmann::ordered_json& messages,
                                     const ChatOptions& options = {}) const;
  // OK, or why no chat can be written.
  absl::Status status() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// The template of a Hugging Face directory: chat_template.jinja, or "chat_template" of
// tokenizer_config.json (a string, or a list with one named "default"). Nothing if it has none. A
// template that is invalid or not supported refuses every chat with its status(), so that
// completions, which need no template, still work. An error means that a file cannot be read.
absl::StatusOr<std::optional<ChatTemplate>> load_chat_template(const std::string& directory);

// Jinja templates, rendered by Python's Jinja2 in a process of its own.

struct TemplateProcessOptions {
  std::vector<std::string> pythons = {"/usr/bin/python3", "python3"};  // the first with Jinja2
  std::chrono::seconds compute{2};  // of the processor, for one call
  // Until a process that does not answer is killed.
  Time patience = patient(std::chrono::seconds(30));
};

// A Python process that renders templates as transformers' apply_chat_template does
// (render_templates.py). A template is an untrusted program: the process cannot open files or
// sockets or start processes, and has limits of time and memory. It starts at the first call, and
// again at the next call if it died. Any threads may call; one is served at a time.
class TemplateProcess {
 public:
  explicit TemplateProcess(TemplateProcessOptions options = {}) : options_(std::move(options)) {}
  TemplateProcess(const TemplateProcess&) = delete;
  TemplateProcess& operator=(const TemplateProcess&) = delete;
  ~TemplateProcess() { end(); }

  // The one of this program, while anybody has it.
  static std::shared_ptr<TemplateProcess> shared();

  // InvalidArgument with the line of what is no template. FailedPrecondition without a Python that
  // has Jinja2.
  absl::Status compile(std::string_view source);
  // `variables` is an object. InvalidArgument with the template's words where it calls
  // raise_exception(), or with what is wrong or exceeds a limit: `compute`, an answer of 64 MiB, or
  // memory (512 MiB, less where this process has less than 8 GiB left; questions count it as
  // taken). DeadlineExceeded or Unavailable where the process is at fault.
  absl::StatusOr<std::string> render(std::string_view source,
                                     const nlohmann::ordered_json& variables);
  // The process id; 0 if no process runs.
  pid_t pid();

 private:
  absl::StatusOr<std::string> call(std::string_view source,
                                   const nlohmann::ordered_json& variables);
  absl::StatusOr<std::string> ask(std::string_view request);
  absl::Status start();
  absl::Status start(const std::string& python);
  absl::Status send(std::string_view bytes);
  absl::StatusOr<std::string> receive(size_t size);
  absl::StatusOr<std::string> answer();
  absl::Status wait_for(short events);
  int end();

  std::mutex mutex_;
  TemplateProcessOptions options_;
  pid_t pid_ = 0;
  int64_t promised_ = 0;  // bytes of memory that it may still take
  base::UniqueFd socket_;
  std::chrono::steady_clock::time_point deadline_{};
  absl::Status failure_;  // the last, and how many there were in a row
  int failures_ = 0;
  std::chrono::steady_clock::time_point failed_at_;
};

}  // namespace baton::engine
