#include "io/json_splice.h"

#include "zorro/core/error.h"

namespace zorro {
namespace {

/// Walks the text of a valid JSON object.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : text_(text) {}

  size_t position() const { return position_; }
  char peek() const {
    ZORRO_ASSERT(position_ < text_.size());
    return text_[position_];
  }
  void advance() { ++position_; }

  void skip_space() {
    while (position_ < text_.size() &&
           (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r'))
      advance();
  }

  /// At an opening quote: moves past the closing one and returns what stands between, escapes
  /// unread.
  std::string_view skip_string() {
    advance();
    const size_t begin = position_;
    while (peek() != '"') position_ += peek() == '\\' ? 2 : 1;
    const std::string_view content = text_.substr(begin, position_ - begin);
    advance();
    return content;
  }

  void skip_value() {
    int depth = 0;
    while (true) {
      const char c = peek();
      if (c == '"') {
        skip_string();
        if (depth == 0) return;
        continue;
      }
      if (depth == 0 && (c == ',' || c == '}')) return;
      if (c == '{' || c == '[') ++depth;
      if (c == '}' || c == ']') --depth;
      advance();
      if (depth == 0 && (c == '}' || c == ']')) return;
    }
  }

 private:
  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace

std::string splice_json(std::string_view object,
                        const std::vector<std::pair<std::string, std::string>>& values) {
  std::string out;
  std::vector<bool> used(values.size(), false);
  Cursor cursor(object);
  cursor.skip_space();
  cursor.advance();  // {
  size_t copied = 0;
  bool empty = true;
  while (true) {
    cursor.skip_space();
    if (cursor.peek() == ',') {
      cursor.advance();
      continue;
    }
    if (cursor.peek() == '}') break;
    empty = false;
    const std::string_view key = cursor.skip_string();
    cursor.skip_space();
    cursor.advance();  // :
    cursor.skip_space();
    const size_t begin = cursor.position();
    cursor.skip_value();
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].first != key) continue;
      out.append(object.substr(copied, begin - copied)).append(values[i].second);
      copied = cursor.position();
      used[i] = true;
    }
  }
  out.append(object.substr(copied, cursor.position() - copied));
  for (size_t i = 0; i < values.size(); ++i) {
    if (used[i]) continue;
    if (!empty) out += ", ";
    empty = false;
    out.append("\"").append(values[i].first).append("\": ").append(values[i].second);
  }
  out.append(object.substr(cursor.position()));
  return out;
}

}  // namespace zorro
