// Output text as a client sees it: holds back what may become a stop string.
#include "engine/serve/requests/output_text.h"

#include <algorithm>
#include <utility>

namespace baton::engine::serve {

OutputText::OutputText(const Tokenizer& tokenizer, std::vector<std::string> stop)
    : decoder_(tokenizer), stop_(std::move(stop)) {}

std::string OutputText::push(int32_t token) {
  if (stopped_) return "";
  return release(decoder_.push(token));
}

std::string OutputText::finish() {
  if (stopped_) return "";
  std::string text = release(decoder_.finish());
  if (!stopped_) text += std::exchange(held_, "");
  return text;
}

std::string OutputText::release(std::string_view piece) {
  held_ += piece;
  size_t found = std::string::npos;
  for (const std::string& stop : stop_) found = std::min(found, held_.find(stop));
  if (found != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, "").substr(0, found);
  }
  // The longest end of the text that is a start of a stop string has to wait.
  size_t keep = 0;
  for (const std::string& stop : stop_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) {
        keep = n;
      }
    }
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

}  // namespace baton::engine::serve
